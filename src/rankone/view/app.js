// The viewer: what was decomposed, every component and subcomponent, when each matters, and what it does.
// The address after # says what is shown: #overview, #subcomponents, #component:3, #LAYER/INDEX; with two
// runs, those of the second begin with #~2/. All text of the user's goes through textContent, never markup.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const ROW = 32;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node[key] = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
}
const cell = (tag, content, numeric) => el(tag, { class: numeric ? "n" : null, scope: tag === "th" ? "col" : null }, content);
const scrolled = node => el("div", { class: "scroll", tabindex: "0" }, node);

function table(head, rows, numeric = []) {
  return scrolled(el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, i) => cell("th", name, numeric.includes(i))))),
    el("tbody", {}, rows.map(row => el("tr", {}, row.map((value, i) => cell("td", value, numeric.includes(i))))))));
}

// One run, with what is asked of it often.
class Run {
  constructor(given, number) {
    Object.assign(this, given);
    this.number = number;
    this.count = this.part_indices.length;
    this.byName = new Map(this.part_indices.map((c, i) => [`${this.layerOf(i)}/${c}`, i]));
    this.about = new Map(this.layers.map(layer => [layer.name, layer]));
  }
  layerOf(i) { return this.order[this.part_layers[i]]; }
  title(i) { return `${this.layerOf(i)} ${this.part_indices[i]}`; }
  prefix() { return this.number > 1 ? `~${this.number}/` : ""; }
  page(name) { return `#${this.prefix()}${name}`; }
  address(i) { return this.page(`${encodeURIComponent(this.layerOf(i))}/${this.part_indices[i]}`); }
  link(i, text) { return el("a", { href: this.address(i) }, text || this.title(i)); }
}
const runs = DATA.runs.map((given, i) => new Run(given, i + 1));

// A table of any length: only the rows in sight exist.
class Grid {
  constructor(label, columns, open) {
    this.columns = columns; this.open = open; this.sorted = null; this.up = false; this.active = 0; this.shown = [];
    this.head = el("div", { class: "head", role: "row" }, columns.map((column, k) =>
      el("div", { role: "columnheader", class: this.classes(column), "aria-sort": "none" },
        el("button", { title: column.about || `Sort by ${column.title}`, onclick: () => this.sort(k) }, column.title))));
    this.rows = el("div", { class: "rows", role: "rowgroup" });
    this.node = el("div", { class: "grid", role: "grid", "aria-label": label, tabindex: "0", onscroll: () => this.draw(), onkeydown: event => this.key(event) },
      el("div", { role: "rowgroup", class: "heads" }, this.head), this.rows);
    const widths = list => list.map(column => column.width || "minmax(4.3rem, 1fr)").join(" ");
    this.node.style.setProperty("--columns", widths(columns));
    this.node.style.setProperty("--columns-narrow", widths(columns.filter(column => !column.minor)));
    this.node.style.setProperty("--least", `${columns.length * 5.5}rem`);
  }
  classes(column) { return [column.text ? "" : "n", column.minor ? "minor" : ""].join(" ").trim() || null; }
  fill(ids) {
    this.ids = ids; this.active = 0; this.node.scrollTop = 0;
    this.node.setAttribute("aria-rowcount", ids.length + 1);
    if (this.sorted !== null) this.order();
    this.draw(true);
  }
  sort(k) {
    this.up = this.sorted === k ? !this.up : Boolean(this.columns[k].text);
    this.sorted = k;
    [...this.head.children].forEach((node, i) => node.setAttribute("aria-sort", i !== k ? "none" : this.up ? "ascending" : "descending"));
    this.order();
    this.active = 0; this.node.scrollTop = 0;
    this.draw(true);
  }
  order() {
    const { value } = this.columns[this.sorted], sign = this.up ? 1 : -1;
    const keys = new Map(this.ids.map(id => [id, value(id)]));
    const missing = x => x === null || x === undefined;
    this.ids = [...this.ids].sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      return sign * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
    });
  }
  draw(anew = false) {
    if (!this.ids.length) { this.rows.style.height = "auto"; this.rows.replaceChildren(el("div", { class: "empty" }, "Nothing fits this search.")); return; }
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW) - 6);
    const last = Math.min(this.ids.length, first + Math.ceil((this.node.clientHeight || 600) / ROW) + 14);
    if (!anew && this.first === first && this.last === last) return;
    this.first = first; this.last = last;
    this.rows.style.height = this.ids.length * ROW + 2 + "px";
    const nodes = [];
    for (let place = first; place < last; place++) {
      const id = this.ids[place];
      const row = el("div", { class: place === this.active ? "row active" : "row", role: "row", "aria-rowindex": place + 2, "aria-selected": place === this.active ? "true" : "false", onclick: event => { if (!event.target.closest("a")) this.open(id); } },
        this.columns.map(column => el("div", { role: "gridcell", class: this.classes(column) }, column.show ? column.show(id) : short(column.value(id)))));
      row.style.top = place * ROW + "px";
      nodes.push(row);
    }
    this.rows.replaceChildren(...nodes);
  }
  key(event) {
    if (event.target !== this.node) return;
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && this.ids.length) { this.open(this.ids[this.active]); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.active = Math.max(0, Math.min(this.ids.length - 1, this.active + moves[event.key]));
    const top = this.active * ROW, height = this.node.clientHeight - 2 * ROW;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    else if (top > this.node.scrollTop + height) this.node.scrollTop = top - height;
    this.draw(true);
  }
}

// Words that all must occur, and conditions such as rate>0.1.
function matcher(text, wordsOf, numbers) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map(word => {
    const condition = /^([a-z]+)(<=|>=|<|>|=)(-?[\d.]+(?:e-?\d+)?)%?$/.exec(word);
    if (condition && numbers[condition[1]]) {
      const [, name, sign, given] = condition, limit = word.endsWith("%") ? given / 100 : +given, of = numbers[name];
      const holds = { "<": x => x < limit, ">": x => x > limit, "<=": x => x <= limit, ">=": x => x >= limit, "=": x => x === limit }[sign];
      return i => of(i) !== null && of(i) !== undefined && holds(of(i));
    }
    return /^\d+$/.test(word) ? i => wordsOf(i).includes(word) : i => wordsOf(i).some(w => w.includes(word));
  });
  return i => tests.every(test => test(i));
}

function searchable(grid, all, wordsOf, numbers, layers) {
  const search = el("input", { type: "search", id: "search", "aria-label": "Search", placeholder: "Search: layer, index, cost>1% (key: /)" });
  const layer = layers && layers.length > 1 ? el("select", { "aria-label": "Layer", id: "layer" }, el("option", { value: "" }, "all layers"), layers.map(name => el("option", { value: name }, name))) : null;
  const count = el("span", { class: "soft", role: "status" });
  const update = () => {
    const fits = matcher(search.value, wordsOf, numbers);
    const kept = all.filter(i => (!layer || !layer.value || wordsOf(i)[0] === layer.value.toLowerCase()) && fits(i));
    count.textContent = kept.length === all.length ? `${all.length.toLocaleString("en")} rows` : `${kept.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} rows`;
    grid.fill(kept);
  };
  search.oninput = update; if (layer) layer.onchange = update;
  return [el("div", { class: "tools" }, search, layer, count), grid.node, update];
}

function notices(run) { return run.missing.map(text => el("p", { class: "notice", role: "note" }, text)); }

function verdict(run) {
  const found = run.verdict;
  if (!found) return null;
  const kind = found.recovered === true || (found.recovered === null && found.good) ? "yes" : found.good === null && found.recovered === null ? "" : "no";
  const headline = found.recovered === true ? "Recovered: every known mechanism was found, without an error" : found.recovered === false ? "Not recovered: the known mechanisms were not all found" : `Verdict: ${found.word}`;
  return el("div", { class: `verdict ${kind}` }, el("strong", {}, headline),
    found.recovered === null ? null : el("p", {}, `Verdict without knowing them: ${found.word}.`),
    el("ul", {}, found.reasons.map(reason => el("li", {}, reason))));
}

const PAGES = {
  overview: ["Overview", () => true], components: ["Components", run => run.components && run.components.length],
  subcomponents: ["Subcomponents", run => run.count], importances: ["Importances", run => run.heat && Object.keys(run.heat).length],
  training: ["Training", run => run.history.steps], compare: ["Side by side", () => runs.length > 1],
};

const show = {
  overview(run) {
    const parts = [el("h1", {}, run.name)];
    const steps = run.planned && run.steps < run.planned ? `unfinished: ${run.steps.toLocaleString("en")} of ${run.planned.toLocaleString("en")} steps` : `${run.steps.toLocaleString("en")} steps`;
    parts.push(el("p", { class: "soft" }, [run.target && `A ${run.target}`, steps, run.seed === null || run.seed === undefined ? null : `seed ${run.seed}`, run.version && `rankone ${run.version}`].filter(Boolean).join(", ") + "."));
    parts.push(...notices(run), verdict(run));
    parts.push(el("p", {}, "Each weight matrix is written as a sum of rank-one ", el("em", {}, "subcomponents"), ", of which as few as possible matter on any one input. A causal importance between 0 and 1 says how much one matters; above 0.1 it is on, and one that is ever on is alive. A ", el("em", {}, "component"), " is a group of them that are on together."));
    if (run.layers.length) {
      const alive = name => run.part_layers.filter(k => run.order[k] === name).length;
      parts.push(el("h2", {}, "What was decomposed"), table(["matrix", "shape", "subcomponents", run.rates ? "alive" : "listed", "on per datapoint (L0)"],
        run.layers.map(layer => [el("code", {}, layer.name + (layer.tied ? ` (shares those of ${layer.tied})` : "")), layer.shape.join(" × "), layer.C, alive(layer.name), short(layer.l0)]), [2, 3, 4]));
    }
    if (run.shares) parts.push(el("h2", {}, "How well does it hold?"), el("p", { class: "soft" }, "Lost, of what removing everything costs. A decomposition that holds stays near 0 everywhere."),
      table(["measure", "meaning", "lost"], run.shares.map(([name, meaning, share]) => [el("code", {}, name), meaning, percent(share)]), [2]));
    if (run.ladder) {
      const { with_delta: a, without_delta: b } = run.ladder;
      parts.push(el("h2", {}, "Under attack"), el("p", { class: "soft" }, "An adversary chooses what becomes of everything unimportant; the more steps it has, the worse the masks it finds. Delta is what the sum of subcomponents leaves out of the matrix."),
        table(["steps of the attack", "with delta", "without delta"], Object.keys(a).map(n => [n, percent(a[n]), percent(b[n])]), [0, 1, 2]));
    }
    return parts;
  },

  subcomponents(run) {
    const word = i => [run.layerOf(i).toLowerCase(), String(run.part_indices[i]), run.part_components ? `c${run.part_components[i]}` : ""];
    const numbers = { norm: i => run.norms[i], rate: i => run.rates && run.rates[i], mean: i => run.means && run.means[i], cost: i => run.costs && run.costs[i], index: i => run.part_indices[i] };
    const columns = [
      { title: "layer", text: true, width: "minmax(4.6rem, 2fr)", value: i => run.layerOf(i), show: i => run.link(i, run.layerOf(i)) },
      { title: "index", value: i => run.part_indices[i], about: "Its true index: result.components(layer)[index]" },
      { title: "norm", value: i => run.norms[i] },
      ...(run.rates ? [
        { title: "on", value: i => run.rates[i], show: i => percent(run.rates[i]), about: "The share of datapoints on which its importance is above 0.1 (rate)" },
        { title: "importance", value: i => run.means[i], minor: true, about: "Its mean importance where it is on (mean)" },
        { title: "cost", value: i => run.costs ? run.costs[i] : null, show: i => percent(run.costs && run.costs[i]), about: "Ablation cost: what taking it out changes, of what removing everything changes" },
        { title: "component", value: i => run.part_components ? run.part_components[i] : null, minor: true, show: i => { const c = run.part_components && run.part_components[i]; return c === null || c === undefined ? "–" : el("a", { href: run.page(`component:${c}`) }, String(c)); } },
      ] : []),
    ];
    const grid = new Grid("Subcomponents", columns, i => { location.hash = run.address(i); });
    const [tools, node, update] = searchable(grid, [...Array(run.count).keys()], word, numbers, run.order);
    return [el("h1", {}, run.rates ? "Alive subcomponents" : "Subcomponents"), ...notices(run), el("p", { class: "soft" }, "A click on a heading sorts, a click on a row opens it. In the search, norm, rate, mean, cost and index can be compared: rate>10% cost>1%."), tools, node, update];
  },

  components(run) {
    const list = run.components, names = c => list[c][0].map(i => run.title(i)).join(", ");
    const cost = c => run.component_costs ? run.component_costs[c] : null;
    const columns = [
      { title: "component", value: c => c, width: "7rem", show: c => el("a", { href: run.page(`component:${c}`) }, String(c)) },
      { title: "rank", value: c => list[c][1], about: "The ranks it takes up in all of its matrices" },
      { title: "on", value: c => list[c][2], show: c => percent(list[c][2]), about: "The share of datapoints on which any of its members is on" },
      { title: "cost", value: cost, show: c => percent(cost(c)), minor: true, about: "Ablation cost: what taking out all of it changes, of what removing everything changes" },
      { title: "subcomponents", text: true, width: "minmax(7rem, 5fr)", value: names },
    ].map(column => column.text ? { ...column, show: names } : column);
    const grid = new Grid("Components", columns, c => { location.hash = run.page(`component:${c}`); });
    const words = c => [String(c), ...list[c][0].flatMap(i => [run.layerOf(i).toLowerCase(), String(run.part_indices[i])])];
    const [tools, node, update] = searchable(grid, [...list.keys()], words, { rank: c => list[c][1], rate: c => list[c][2], cost });
    return [el("h1", {}, "Components"), el("p", { class: "soft" }, "Subcomponents that are on together, of one layer or several: the grouping with the shortest description of which are on where."), tools, node, update];
  },

  component(run, number) {
    const found = run.components && run.components[number];
    if (!found) return [el("h1", {}, "No such component"), el("p", {}, `This run has components 0 to ${run.components ? run.components.length - 1 : "–"}.`)];
    const [members, rank, frequency] = found;
    return [crumbs(run, run.components.length, number, c => run.page(`component:${c}`), "components"), el("h1", {}, `Component ${number}`), facts({ rank, "on, of datapoints": percent(frequency), "ablation cost": percent(run.component_costs && run.component_costs[number]) }),
      table(["layer", "index", "norm", "on", "ablation cost"], members.map(i => [run.link(i, run.layerOf(i)), run.link(i, String(run.part_indices[i])), short(run.norms[i]), percent(run.rates && run.rates[i]), percent(run.costs && run.costs[i])]), [1, 2, 3, 4]),
      el("h2", {}, "Where it matters most"), exampleList(run, members)];
  },

  part(run, i) {
    const layer = run.about.get(run.layerOf(i)) || {}, read = decode(run.read[i]), write = decode(run.write[i]);
    const component = run.part_components ? run.part_components[i] : null;
    const known = { norm: short(run.norms[i]) };
    if (run.rates) Object.assign(known, { "on, of datapoints": percent(run.rates[i]), "mean importance when on": short(run.means[i]), "ablation cost": percent(run.costs && run.costs[i]) });
    if (component !== null && component !== undefined) known.component = el("a", { href: run.page(`component:${component}`) }, String(component));
    const nodes = [crumbs(run, run.count, i, j => run.address(j), "subcomponents"), el("h1", {}, `${run.layerOf(i)} · ${run.part_indices[i]}`), facts(known)];
    const side = (title, values, what, shape, meaning) => el("section", {}, el("h2", {}, title), el("p", { class: "soft" }, meaning), vector(values, what, shape), entries(values, run[what === "read vector" ? "read" : "write"][i]));
    nodes.push(el("div", { class: "two" },
      side("It reads", read, "read vector", layer.patch || imageShape(run, read.length), "Its read vector v: what it looks for in the layer's input."),
      side("It writes", write, "write vector", null, "Its write vector u: what it adds to the layer's output, times what it reads.")));
    if (run.curves && run.curves[i]) nodes.push(el("h2", {}, "When it is important"), el("p", { class: "soft" }, run.curves[i].kind === "curve" ? "Its importance as a function of its inner activation, over the range that occurs in the data." : "Its importance against its inner activation on some datapoints; it depends on more than that."), el("div", { class: "plot", "data-curve": i }));
    if (run.examples) nodes.push(el("h2", {}, "Where it matters most"), exampleList(run, [i]));
    nodes.push(...neighbours(run, i, component));
    if (run.changes) nodes.push(el("h2", {}, "What taking it out changes"), run.changes[i].length
      ? table(["output", "mean change", "mean absolute change"], run.changes[i].map(([k, mean, size]) => [String(k), short(mean), short(size)]), [0, 1, 2])
      : el("p", {}, run.costs && run.costs[i] === null ? "Not measured for this one: only the first thousand are taken out one by one." : "Nothing, on this data."));
    return [...nodes, () => drawCurve(run, i)];
  },

  importances(run, chosen) {
    const names = Object.keys(run.heat), name = names.includes(chosen) ? chosen : names[0], heat = run.heat[name];
    const values = bytes(heat.q), columns = heat.columns.length, rows = heat.rows.length;
    const select = el("select", { "aria-label": "Layer", onchange: event => draw(run, show.importances(run, event.target.value)) }, names.map(n => el("option", { value: n, selected: n === name }, n)));
    const width = Math.max(3, Math.min(48, Math.floor(900 / columns)));
    const labels = width < 18 ? null : el("div", { class: "columns", "aria-hidden": "true" }, heat.columns.map(c => { const span = el("span", {}, String(c)); span.style.width = width + "px"; return span; }));
    const canvas = cells(rows, columns, (r, c) => values[r * columns + c] / 255, (r, c) => `subcomponent ${heat.columns[c]}, datapoint ${heat.rows[r]}: ${short(values[r * columns + c] / 255)}`,
      { heat: true, cell: width, tall: 5, label: `Importances of ${columns} subcomponents of ${name} on ${rows} datapoints`, open: (r, c) => { const i = run.byName.get(`${name}/${heat.columns[c]}`); if (i !== undefined) location.hash = run.address(i); } });
    return [el("h1", {}, "Importances on a sample of the data"), el("p", { class: "soft" }, "A column is an alive subcomponent, a row a datapoint that training never drew; the darker, the more it matters there. Pointing shows index and value, a click opens the subcomponent."), el("div", { class: "tools" }, select), el("div", { class: "scroll wide", tabindex: "0" }, labels, canvas)];
  },

  training(run) {
    const { steps, losses, l0 } = run.history, box = () => el("div", { class: "plot" }), a = box(), b = box();
    a.setAttribute("aria-label", "Terms of the loss against steps"); b.setAttribute("aria-label", "L0 of each layer against steps");
    return [el("h1", {}, "Training"), el("p", { class: "soft" }, "Dragging over a curve zooms in, a double click zooms out; a click in the legend hides a line."), el("h2", {}, "Terms of the loss"), a, el("h2", {}, "Important subcomponents per datapoint (L0)"), b,
      () => { plot(a, steps, Object.entries(losses), { log: true, xLabel: "step" }); plot(b, steps, Object.entries(l0), { xLabel: "step" }); }];
  },

  compare() {
    const found = DATA.comparison || {}, [first, second] = runs;
    const nodes = [el("h1", {}, "Side by side"), table(["", first.name, second.name], [
      ["verdict", ...runs.map(run => run.verdict ? run.verdict.word : "–")], ["alive", ...runs.map(run => run.count)],
      ["components", ...runs.map(run => run.components ? run.components.length : "–")],
      ["on per datapoint (L0)", ...runs.map(run => short(run.layers.reduce((sum, layer) => sum + (layer.l0 || 0), 0)))],
      ...(first.shares || []).map(([name], k) => [`lost, ${name}`, ...runs.map(run => run.shares ? percent(run.shares[k][2]) : "–")]),
    ], [1, 2])];
    if (found.why) return [...nodes, el("p", { class: "notice" }, found.why)];
    for (const [name, layer] of Object.entries(found.layers || {})) {
      nodes.push(el("h2", {}, el("code", {}, name)), el("p", { class: "soft" }, `${layer.alive.join(" and ")} alive; ${layer.same} are the same (cosine 0.9 and up). Mean cosine ${short(layer.cosine)}; importances agree to ${percent(layer.agreement)}.`));
      const side = (run, c) => { const i = run.byName.get(`${name}/${c}`); return i === undefined ? String(c) : run.link(i, String(c)); };
      nodes.push(table([first.name, second.name, "cosine", "importances agree"], layer.matches.slice(0, 200).map(([a, b, cosine, agreement]) => [side(first, a), side(second, b), short(cosine), percent(agreement)]), [0, 1, 2, 3]));
    }
    return nodes;
  },
};

function facts(values) { return el("dl", { class: "facts" }, Object.entries(values).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value instanceof Node ? value : String(value))))); }

function crumbs(run, count, at, address, back) {
  return el("div", { class: "crumbs" }, el("a", { href: run.page(back) }, `All ${back}`),
    at > 0 ? el("a", { href: address(at - 1), rel: "prev" }, "← previous") : null, at < count - 1 ? el("a", { href: address(at + 1), rel: "next" }, "next →") : null);
}

function entries(values, given) {
  const top = largest(values);
  const rest = given.at ? ` Only the ${given.at.length} largest of ${given.n} entries are kept.` : "";
  return el("p", { class: "soft" }, top.length ? `Largest: ${top.map(i => `${i} (${short(values[i])})`).join(", ")}.${rest}` : "All entries are 0.");
}

function imageShape(run, n) {
  const image = run.datapoints && Object.values(run.datapoints).find(point => point.kind === "image");
  return image && image.n === n && image.shape[0] * image.shape[1] === n ? [1, ...image.shape] : null;
}

function exampleList(run, parts) {
  const best = new Map();
  for (const i of parts) for (const [g, key, position] of run.examples[i]) if (!best.has(key) || best.get(key)[0] < g) best.set(key, [g, position]);
  const found = [...best].sort((a, b) => b[1][0] - a[1][0]).slice(0, 8);
  if (!found.length) return el("p", {}, "Nowhere on this data.");
  return el("div", { class: "examples" }, found.map(([key, [g, position]]) => el("div", { class: "example" },
    el("div", { class: "soft" }, `importance ${short(g)}, datapoint ${key}`), point(run.datapoints[key], position))));
}

function point(data, position) {
  if (!data || data.kind === "other") return el("p", { class: "soft" }, "This input cannot be drawn.");
  if (data.kind === "tokens") return el("div", { class: "tokens" }, data.tokens.flatMap((token, k) => [data.start + k === (position[0] || 0) ? el("mark", { title: "here" }, String(token)) : String(token), " "]));
  const values = decode(data);
  if (data.kind === "image") return vector(values, "input", [values.length / (data.shape[0] * data.shape[1]), ...data.shape]);
  const on = [...values.keys()].filter(k => values[k] !== 0);
  return el("div", {}, vector(values, "input", null), el("div", { class: "soft" }, on.length <= 6 ? on.map(k => `${k}: ${short(values[k])}`).join(", ") || "all 0" : `${on.length} entries are not 0`));
}

function neighbours(run, i, component) {
  const nodes = [];
  if (component !== null && component !== undefined) {
    const others = run.components[component][0].filter(j => j !== i);
    nodes.push(el("h2", {}, "Its neighbours"), el("p", {}, others.length ? "On together with it, in its component: " : "It is a component by itself.", others.slice(0, 40).flatMap((j, k) => [k ? ", " : "", run.link(j)]), others.length > 40 ? ` and ${others.length - 40} more.` : ""));
  }
  return nodes;
}

function drawCurve(run, i) {
  const holder = main.querySelector("[data-curve]"), curve = run.curves && run.curves[i];
  if (!holder || !curve) return;
  holder.setAttribute("aria-label", `Importance from ${short(Math.min(...curve.g))} to ${short(Math.max(...curve.g))} over inner activations from ${short(curve.h[0])} to ${short(curve.h.at(-1))}`);
  plot(holder, curve.h, [["importance", curve.g]], { xLabel: "inner activation v · a", points: curve.kind === "points", height: 200, range: [-0.03, 1.05] });
}

// Addresses -----------------------------------------------------------------------------------------------
function parse(hash) {
  let words = hash.replace(/^#/, "").split("/").map(word => { try { return decodeURIComponent(word); } catch { return word; } });
  let run = runs[0];
  if (/^~\d+$/.test(words[0])) { run = runs[+words[0].slice(1) - 1] || run; words = words.slice(1); }
  if (words.length === 2) { const i = run.byName.get(words.join("/")); return i === undefined ? [run, "unknown", words] : [run, "part", i]; }
  const [page = "overview"] = words, component = /^component:(\d+)$/.exec(page);
  if (component) return [run, "component", +component[1]];
  return [run, page === "" ? "overview" : PAGES[page] ? page : "unknown", words];
}

let current = [];
function render() {
  const [run, page, detail] = current = parse(location.hash);
  const known = page in PAGES && PAGES[page][1](run) || ["part", "component"].includes(page);
  document.getElementById("run-name").textContent = run.name;
  const links = Object.entries(PAGES).filter(([, [, there]]) => there(run)).map(([name, [title]]) => el("a", { href: run.page(name), "aria-current": name === page || { part: "subcomponents", component: "components" }[page] === name ? "page" : null }, title));
  const switches = runs.length > 1 ? runs.map(other => el("a", { href: other.page("overview"), "aria-current": other === run ? "true" : null, title: `Show ${other.name}` }, `Run ${other.number}`)) : [];
  document.getElementById("nav").replaceChildren(...switches, ...links);
  draw(run, known ? show[page](run, detail) : missingPage(run, detail));
  document.title = `${main.querySelector("h1").textContent} – ${run.name} – rankone`;
}

function draw(run, nodes) {
  showTip(null, "");
  main.replaceChildren(...nodes.filter(node => node && typeof node !== "function"));
  for (const then of nodes) if (typeof then === "function") then();
}

function missingPage(run, words) {
  return [el("h1", {}, "Not here"), el("p", {}, `This page knows nothing of “${words.join("/")}”. A subcomponent that is never important is not listed.`), el("p", {}, el("a", { href: run.page("subcomponents") }, "All subcomponents"))];
}

// Colours and keys -----------------------------------------------------------------------------------------
const THEMES = ["system", "light", "dark"], dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try { theme = THEMES.includes(localStorage.getItem("rankone-theme")) ? localStorage.getItem("rankone-theme") : "system"; } catch { /* a file may have no storage */ }
function paint() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  document.getElementById("theme").textContent = `Colours: ${theme}`;
}
document.getElementById("theme").onclick = () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("rankone-theme", theme); } catch { /* not kept then */ }
  paint(); render();
};
dark.onchange = () => { paint(); render(); };
document.getElementById("skip").onclick = () => main.focus();
onhashchange = () => { render(); scrollTo(0, 0); main.focus({ preventScroll: true }); };
onkeydown = event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const search = document.getElementById("search");
  if (event.key === "/" && search) { event.preventDefault(); search.focus(); }
  const step = { j: "next", k: "prev", ArrowRight: "next", ArrowLeft: "prev" }[event.key], link = step && main.querySelector(`a[rel=${step}]`);
  if (link) location.hash = link.getAttribute("href");
  if (event.key === "Escape") location.hash = current[0].page("subcomponents");
};
paint(); render();
document.documentElement.dataset.ready = "true";
