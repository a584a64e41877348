"use strict";
/* What the pages share: reading their data, charts, sortable tables, copy buttons. */
const probe = (() => {
  const byId = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(byId(id).textContent);
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  /* Figures read as in the other forms of the report: three significant digits, like C's %.3g. */
  const show = (value, digits = 3) => {
    if (value === null || value === undefined) return "-";
    if (typeof value !== "number") return String(value);
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    if (Number(power) >= -4 && Number(power) < digits) return String(Number(value.toPrecision(digits)));
    return `${Number(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
  };

  /* Charts: bokeh draws on a canvas, so the colours of the page are handed to it, again when the scheme changes. */
  const INK = ["axis_label_text_color", "major_label_text_color", "label_text_color", "text_color"];
  const LINES = ["axis_line_color", "major_tick_line_color"];
  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const soft = style.getPropertyValue("--soft").trim();
    const line = style.getPropertyValue("--line").trim();
    for (const doc of Bokeh.documents) {
      for (const model of doc.all_models) {
        const wanted = {};
        for (const name of INK) if (name in model.properties && model.type !== "Scatter") wanted[name] = soft;
        for (const name of LINES) if (name in model.properties) wanted[name] = soft;
        if ("grid_line_color" in model.properties) wanted.grid_line_color = line;
        if (Object.keys(wanted).length) model.setv(wanted);
      }
    }
  };
  const drawCharts = async () => {
    const figures = read("figure-data");
    await Promise.all(Object.keys(figures).map((id) => Bokeh.embed.embed_item(figures[id], id)));
    paint();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  };
  if (typeof Bokeh !== "undefined") drawCharts();

  /* A table that sorts, filters by words, and grows by a page of rows at a time. Its parts are found by their ids:
     NAME-table, -filter, -status, -more, -note and the block NAMEs-block.

     columns: key of each cell of a row; start: the column that it is sorted by at first, falling: from the largest
     down; words: keys of words (left-aligned, sorted from the first on); text(row): what the filter searches;
     keeps(row): a further filter; rank(row, key): what a column sorts by; fill(cell, row, key): writes a cell;
     look(row): class of the line. */
  const PAGE = 200;
  const sortable = (options) => {
    const { name, noun, columns, words, rows, start, falling = false, text, rank, fill, note = "" } = options;
    const { keeps = () => true, look = () => "" } = options;
    const table = byId(`${name}-table`);
    const sorting = { key: start, descending: falling };
    let limit = PAGE;
    const compareRows = (first, second) => {
      const a = rank(first, sorting.key);
      const b = rank(second, sorting.key);
      if (a === null || b === null) return (a === null) - (b === null);
      const way = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return sorting.descending ? -way : way;
    };
    const line = (row) => {
      const node = make("tr", look(row));
      for (const key of columns) {
        const cell = make("td", words.has(key) ? "" : "n");
        fill(cell, row, key);
        node.append(cell);
      }
      return node;
    };
    const draw = () => {
      const wanted = byId(`${name}-filter`).value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = rows.filter((row) => keeps(row) && wanted.every((word) => text(row).toLowerCase().includes(word)));
      found.sort(compareRows);
      table.tBodies[0].replaceChildren(...found.slice(0, limit).map(line));
      const shown = Math.min(limit, found.length);
      byId(`${name}-status`).textContent = `${found.length} of ${rows.length} ${noun}` +
        (shown < found.length ? `, the first ${shown} shown` : "");
      const more = byId(`${name}-more`);
      more.hidden = shown >= found.length;
      more.textContent = `Show ${Math.min(5 * PAGE, found.length - shown)} more`;
      for (const head of table.tHead.rows[0].cells) {
        if (head.dataset.key !== sorting.key) head.removeAttribute("aria-sort");
        else head.setAttribute("aria-sort", sorting.descending ? "descending" : "ascending");
      }
    };
    const sortBy = (key) => {
      /* Figures are read from the largest down, names and verdicts from the first on. */
      const startsUp = words.has(key) || (key === start && !falling);
      sorting.descending = sorting.key === key ? !sorting.descending : !startsUp;
      sorting.key = key;
      draw();
    };
    for (const head of table.tHead.rows[0].cells) {
      head.querySelector("button").addEventListener("click", () => sortBy(head.dataset.key));
    }
    const restart = () => { limit = PAGE; draw(); };
    byId(`${name}-filter`).addEventListener("input", restart);
    byId(`${name}-more`).addEventListener("click", () => { limit += 5 * PAGE; draw(); });
    byId(`${name}-note`).textContent = note;
    draw();
    byId(`${name}s-block`).hidden = false;
    return restart;
  };

  /* Copy buttons: the clipboard API where the browser grants it, a selection otherwise. */
  const copy = async (button) => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }

  return { byId, read, make, show, sortable };
})();
