"""The commands that use a decomposition: `rankone cluster`."""

from json import dumps as to_json

from rankone import terminal
from rankone.options import AsJson, Directory, Model, given


def cluster(
    directory: Directory,
    /,
    *,
    alpha: float = 1.0,
    batches: int = 8,
    model: Model = None,
    json: AsJson = False,
) -> None:
    """Group the subcomponents of a run into components: those that are important together, across layers.

    Parameters
    ----------
    alpha
        What a rank costs, in units of what naming a component costs: the higher, the fewer are joined. At 1,
        two subcomponents are joined that are on together more often than apart.
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
