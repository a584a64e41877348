"use strict";
/* Noise floors in colours and words. Steps: healthy pairs stay near 1, a tensor is suspect from 4 and divergent from 10
   floors over the level before. */
const floors = {
  STEPS: [1, 4, 10, 50, 1000],
  NON_FINITE: 1e9,
  level: (cell) => floors.STEPS.filter((step) => cell >= step).length,
  words: (cell) => (cell === null ? "not compared" : cell >= floors.NON_FINITE ? "not finite on one side" : `${probe.show(cell)} noise floors`),
  short: (name) => name.replace(/^layers\./, "L").replace("embed_tokens", "embed"),
};

/* The layer curve of a token: the error of the row that scores it after each layer, drawn as SVG in the colours of the
   page. One panel for all tokens, put where the reader asked for it. Returns open(column, token, anchor), and null where
   the page has no curves. */
const buildCurves = (heat) => {
  const { byId, make, show } = probe;
  const panel = byId("curve-panel");
  if (!heat || !panel) return null;
  const SVG = byId("curve-chart").querySelector("svg").namespaceURI;
  const HEIGHT = 210;
  const LEFT = 58;
  const RIGHT = 14;
  const TOP = 14;
  const BOTTOM = 34;
  const shape = (name, attributes, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const finite = (cell) => cell !== null && cell < floors.NON_FINITE;
  let shown = null;
  let opener = null;

  /* The place on the axis of the tensor where the row leaves the band: its own layer, or the end that it is next to. */
  const placeOf = (first) => {
    const name = first[0].split(":")[0];
    const exact = heat.layers.indexOf(name);
    if (exact >= 0) return exact;
    const layer = (text) => (/^layers\.(\d+)/.exec(text) || [null, null])[1];
    if (layer(name) === null) return heat.layers.length - 1;
    const after = heat.layers.findIndex((stream) => layer(stream) !== null && Number(layer(stream)) >= Number(layer(name)));
    return after < 0 ? heat.layers.length - 1 : after;
  };
  const draw = () => {
    const cells = heat.cells[shown];
    const width = Math.max(260, byId("curve-chart").clientWidth);
    const known = cells.filter(finite);
    /* A decade below the others stands for zero, one above them for what is not finite. */
    const zero = known.includes(0);
    const odd = cells.some((cell) => cell !== null && !finite(cell));
    const low = Math.floor(Math.log10(Math.min(0.1, ...known.filter((cell) => cell > 0)))) - zero;
    const high = Math.ceil(Math.log10(Math.max(2 * heat.row_band, ...known))) + odd;
    const tick = (power) => (zero && power === low ? "0" : odd && power === high ? "not finite" : show(10 ** power));
    const x = (index) => LEFT + (cells.length > 1 ? (index / (cells.length - 1)) * (width - LEFT - RIGHT) : (width - LEFT - RIGHT) / 2);
    const up = (power) => TOP + ((high - power) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const y = (cell) => up(!finite(cell) ? high : cell > 0 ? Math.log10(cell) : low);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-labelledby": "curve-title curve-words" });
    svg.append(shape("rect", { class: "floor", x: LEFT, y: up(0), width: width - LEFT - RIGHT, height: up(low) - up(0) }));
    const stride = Math.ceil((high - low) / 6);
    for (let power = low; power <= high; power += 1) {
      if (power !== low && power !== high && (power % stride || high - power < stride || power - low < stride)) continue;
      svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(power), y2: up(power) }));
      svg.append(shape("text", { x: LEFT - 6, y: up(power) + 4, "text-anchor": "end" }, tick(power)));
    }
    svg.append(shape("line", { class: "band", x1: LEFT, x2: width - RIGHT, y1: y(heat.row_band), y2: y(heat.row_band) }));
    const every = Math.ceil((cells.length * 46) / (width - LEFT - RIGHT));
    heat.layers.forEach((name, index) => {
      const last = index === cells.length - 1;
      if (last || (index % every === 0 && cells.length - 1 - index >= every)) {
        svg.append(shape("text", { x: x(index), y: HEIGHT - 14, "text-anchor": last ? "end" : index ? "middle" : "start" }, floors.short(name)));
      }
    });
    const first = heat.first[shown];
    if (first) {
      const at = x(placeOf(first));
      svg.append(shape("line", { class: "first-line", x1: at, x2: at, y1: TOP - 6, y2: HEIGHT - BOTTOM }));
    }
    const points = cells.flatMap((cell, index) => (cell === null ? [] : [`${x(index)},${y(cell)}`]));
    svg.append(shape("polyline", { class: "curve", points: points.join(" ") }));
    cells.forEach((cell, index) => {
      if (cell === null) return;
      const point = shape("circle", { class: `point s${floors.level(cell)}`, cx: x(index), cy: y(cell), r: 4 });
      point.append(shape("title", {}, `${heat.layers[index]}: ${floors.words(cell)}`));
      svg.append(point);
    });
    byId("curve-chart").replaceChildren(svg);
  };
  const tell = (first) => {
    if (!first) return "The row that scores it stays within the noise band in every tensor that was compared.";
    const size = first[1] === null ? "not finite on one side" : `relative L2 ${show(first[1])}, where ${show(first[2])} is allowed`;
    return `The row that scores it leaves the noise band first in ${first[0]}: ${size}.`;
  };
  const fill = () => {
    byId("curve-table").tBodies[0].replaceChildren(...heat.cells[shown].map((cell, index) => {
      const line = make("tr");
      line.append(make("td", "mono", heat.layers[index]), make("td", "n", cell !== null && cell >= floors.NON_FINITE ? floors.words(cell) : show(cell)));
      return line;
    }));
  };
  const close = () => {
    panel.hidden = true;
    opener.classList.remove("chosen");
    if (opener.isConnected) opener.focus();
  };
  const open = (column, token, anchor, from) => {
    shown = column;
    if (opener) opener.classList.remove("chosen");
    opener = from;
    opener.classList.add("chosen");
    byId("curve-title").textContent = `Layer curve of ${token}`;
    byId("curve-words").textContent = tell(heat.first[column]);
    anchor.after(panel);
    panel.hidden = false;
    draw();
    fill();
    panel.scrollIntoView({ block: "nearest" });
  };
  byId("curve-close").addEventListener("click", close);
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  addEventListener("resize", () => { if (!panel.hidden) draw(); });

  /* The worst tokens: what names the first layer becomes a button. */
  for (const line of document.querySelectorAll("#worst-tokens tr[data-curve]")) {
    const cell = line.querySelector(".first-at");
    const button = make("button", "link");
    button.type = "button";
    button.append(...cell.childNodes);
    button.setAttribute("aria-label", `${cell.dataset.words}: show the layer curve of token ${line.dataset.token}`);
    cell.replaceChildren(button);
    button.addEventListener("click", () => open(Number(line.dataset.curve), line.dataset.token, line.closest(".scroll"), button));
  }
  return open;
};
