"""The commands that use a decomposition: `rankone cluster`, `rankone view`."""

from json import dumps as to_json
from typing import Annotated

from cyclopts import Parameter

from rankone import terminal
from rankone.options import AnyPath, AsJson, Directory, Model, given


def cluster(
    directory: Directory,
    /,
    *,
    alpha: float = 0.25,
    batches: int = 8,
    model: Model = None,
    json: AsJson = False,
) -> None:
    """Group the subcomponents of a run into components: those that are important together, across layers.

    Parameters
    ----------
    alpha
        What a rank costs, in units of what naming a component costs: the higher, the fewer are joined. At 1,
        two subcomponents are joined that are on together more often than apart; at 0.25, a quarter as often.
    batches
        On how many batches of data to look.
    json
        Print all components with all of their members as JSON.
    """
    from rankone import console
    from rankone.runs.run import load_run

    with given(model):
        components = load_run(directory).result.clusters(alpha=alpha, n_batches=batches)
    if json:
        terminal.write_text(to_json(components.to_dict(), indent=2) + "\n")
    else:
        console.print_components(components)


def view(
    directory: Directory,
    other: Directory | None = None,
    /,
    *,
    attack: int = 80,
    model: Model = None,
    out: AnyPath | None = None,
    show: Annotated[bool, Parameter(name="--open")] = True,
) -> None:
    """Write view.html, one page to click through a run, and open it.

    Every component and subcomponent, when it matters, what it reads and writes, what taking it out changes.
    The page holds all of its data and needs no network.

    Parameters
    ----------
    directory
        A run directory; or tms_5-2, a decomposition that comes with rankone.
    other
        A second run on the same network, shown side by side.
    attack
        Attack it with up to this many steps, and show how it degrades on the way.
    out
        Where to write the page; view.html in the run directory if not given (of a
        shipped one, NAME-view.html here).
    show
        Open it in a browser.
    """
    from rankone.view.runs import view_runs

    with given(model):
        path = view_runs([directory] if other is None else [directory, other], out, attack=attack)
    terminal.say(f"Page: {path}")
    if show:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
