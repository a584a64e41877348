"use strict";
(() => {
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
  const data = read("report-data");

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

  /* Module table: sort, filter, and grow by a page of rows at a time. */
  const PAGE = 200;
  const columns = data.modules.columns;
  const at = Object.fromEntries(columns.map((key, index) => [key, index]));
  const WORDS = new Set(data.words);
  const WHOLE = new Set(["order", "bad", "rows"]);
  const sorting = { key: "order", descending: false };
  let limit = PAGE;

  const rank = (row, key) => (key === "verdict" ? data.verdicts.indexOf(row[at.verdict]) : row[at[key]]);
  const compareRows = (first, second) => {
    const a = rank(first, sorting.key);
    const b = rank(second, sorting.key);
    if (a === null || b === null) return (a === null) - (b === null);
    const way = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    return sorting.descending ? -way : way;
  };
  const breakable = (name) => name.split(/(?<=\.)/).flatMap((part) => [make("wbr"), part]);
  const tableRow = (row) => {
    const line = make("tr", row.length > columns.length ? "is-first" : "");
    columns.forEach((key, index) => {
      const cell = make("td", key === "name" ? "mono" : WORDS.has(key) ? "" : "n");
      if (key === "verdict") cell.append(make("span", `badge ${row[index]}`, row[index]));
      else if (key === "name") cell.append(...breakable(row[index]));
      else cell.textContent = WHOLE.has(key) && row[index] !== null ? String(row[index]) : show(row[index]);
      if (key === "name" && row.length > columns.length) cell.append(" ", make("span", "first", "first divergence"));
      line.append(cell);
    });
    return line;
  };
  const matching = () => {
    const words = byId("module-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = byId("verdict-filter").value;
    return data.modules.rows.filter((row) => {
      const name = row[at.name].toLowerCase();
      return (!verdict || row[at.verdict] === verdict) && words.every((word) => name.includes(word));
    });
  };
  const fillTable = () => {
    const rows = matching().sort(compareRows);
    const body = byId("module-table").tBodies[0];
    body.replaceChildren(...rows.slice(0, limit).map(tableRow));
    const shown = Math.min(limit, rows.length);
    byId("module-status").textContent = `${rows.length} of ${data.modules.rows.length} modules` +
      (shown < rows.length ? `, the first ${shown} shown` : "");
    const more = byId("module-more");
    more.hidden = shown >= rows.length;
    more.textContent = `Show ${Math.min(5 * PAGE, rows.length - shown)} more`;
    for (const head of byId("module-table").tHead.rows[0].cells) {
      if (head.dataset.key !== sorting.key) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", sorting.descending ? "descending" : "ascending");
    }
  };
  const sortBy = (key) => {
    /* Figures are read from the largest down, names and verdicts from the first on. */
    const startsUp = key === "order" || WORDS.has(key);
    sorting.descending = sorting.key === key ? !sorting.descending : !startsUp;
    sorting.key = key;
    fillTable();
  };
  const buildTable = () => {
    const select = byId("verdict-filter");
    select.append(new Option(`all (${data.modules.rows.length})`, ""));
    for (const verdict of data.verdicts) {
      const count = data.modules.rows.filter((row) => row[at.verdict] === verdict).length;
      if (count) select.append(new Option(`${verdict} (${count})`, verdict));
    }
    for (const head of byId("module-table").tHead.rows[0].cells) {
      head.querySelector("button").addEventListener("click", () => sortBy(head.dataset.key));
    }
    const restart = () => { limit = PAGE; fillTable(); };
    byId("module-filter").addEventListener("input", restart);
    select.addEventListener("change", restart);
    byId("module-more").addEventListener("click", () => { limit += 5 * PAGE; fillTable(); });
    if (data.left_out.modules) {
      byId("module-note").textContent = `${data.left_out.modules} modules with the smallest error are left out; report.csv has all.`;
    }
    fillTable();
    byId("modules-block").hidden = false;
  };
  if (byId("module-table")) buildTable();

  /* Token strip: one focus stop, moved with the arrow keys. Steps in nats: 0.01 is usual for a healthy bf16 pair, 0.1
     is where the training frameworks' own checks fail. */
  const STEPS = [0.001, 0.01, 0.03, 0.1, 1];
  const heat = (diff) => (diff === null ? 0 : STEPS.filter((step) => Math.abs(diff) >= step).length);
  const tokenNode = (strip, index) => {
    const text = strip.text[index];
    const response = strip.response[index] === "1";
    const level = heat(strip.diff[index]);
    const node = make("span", `${response ? "response" : "prompt"}${level ? ` h${level}` : ""}${text === null ? " ids" : ""}`,
      text === null ? String(strip.token[index]) : text);
    node.dataset.index = index;
    node.tabIndex = index ? -1 : 0;
    node.title = describe(strip, index);
    return node;
  };
  const describe = (strip, index) => {
    const text = strip.text[index] === null ? "" : ` “${strip.text[index]}”`;
    const side = strip.response[index] === "1" ? "response" : "prompt";
    const figures = strip.diff[index] === null ? "no log-prob on both sides"
      : `log-prob A ${show(strip.logprob_a[index], 4)}, B ${show(strip.logprob_b[index], 4)}, difference ${show(strip.diff[index])}`;
    return `position ${strip.position[index]} (${side}), token ${strip.token[index]}${text}: ${figures}`;
  };
  const drawStrip = () => {
    const strip = data.strips[Number(byId("strip-sequence").value)];
    const nodes = [];
    strip.position.forEach((_, index) => {
      nodes.push(tokenNode(strip, index));
      if (strip.text[index] !== null && strip.text[index].endsWith("\\n")) nodes.push(make("br"));
    });
    byId("strip").replaceChildren(...nodes);
    byId("strip-note").textContent = stripNote(strip);
  };
  const stripNote = (strip) => {
    const notes = [];
    if (strip.left_out) notes.push(`Positions ${strip.position[0]} to ${strip.position.at(-1)} of ${strip.length} tokens.`);
    if (data.left_out.sequences) notes.push(`${data.left_out.sequences} sequences with smaller differences are left out.`);
    if (data.left_out.tokens) notes.push(`${data.left_out.tokens} tokens of the sequences listed are left out; the worst tokens are in the table above in any case.`);
    if (!data.text) notes.push("Token ids are shown: the report was made without token text.");
    return notes.join(" ");
  };
  const moveFocus = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const from = event.target.closest("[data-index]");
    if (!step || !from) return;
    const next = byId("strip").querySelector(`[data-index="${Number(from.dataset.index) + step}"]`);
    if (!next) return;
    event.preventDefault();
    from.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  const readOut = (event) => {
    const node = event.target.closest("[data-index]");
    if (node) byId("strip-readout").textContent = node.title;
  };
  const buildStrip = () => {
    const select = byId("strip-sequence");
    data.strips.forEach((strip, index) => {
      select.append(new Option(`${strip.sequence} (mean ${show(strip.mean_abs)}, max ${show(strip.max_abs)})`, index));
    });
    const worst = data.strips.reduce((best, strip, index) => (strip.max_abs > data.strips[best].max_abs ? index : best), 0);
    select.value = String(worst);
    const bounds = [0, ...STEPS];
    bounds.forEach((low, level) => {
      const item = make("span");
      const words = level === 0 ? `below ${bounds[1]}` : level + 1 < bounds.length ? `${low} – ${bounds[level + 1]}` : `${low} and more`;
      item.append(make("i", level ? `h${level}` : ""), words);
      byId("strip-legend").append(item);
    });
    const prompt = make("span");
    prompt.append(make("i", "prompt"), "prompt");
    byId("strip-legend").append(prompt, "|Δ log-prob| in nats");
    select.addEventListener("change", drawStrip);
    byId("strip").addEventListener("keydown", moveFocus);
    byId("strip").addEventListener("focusin", readOut);
    byId("strip").addEventListener("mouseover", readOut);
    drawStrip();
    byId("strip-block").hidden = false;
  };
  if (data.strips.some((strip) => strip.position.length)) buildStrip();

  /* Heat map: drawn on a canvas in the page's colours; a cursor moves over it with the arrow keys. Steps in noise
     floors: healthy pairs stay near 1, a tensor is suspect from 4 and divergent from 10 floors over the level before. */
  const FLOORS = [1, 4, 10, 50, 1000];
  const NON_FINITE = 1e9;
  const LABELS = 58;
  const EDGE = 4;
  const buildHeat = () => {
    const heat = data.heat;
    const canvas = byId("heat-map");
    const rows = heat.layers.length;
    const columns = heat.tokens.length;
    const level = (cell) => (cell === null ? -1 : FLOORS.filter((step) => cell >= step).length);
    const rowHeight = Math.max(7, Math.min(18, Math.floor(420 / rows)));
    const cursor = { row: 0, column: 0, shown: false };
    heat.cells.forEach((cells, column) => cells.forEach((cell, row) => {
      /* the cursor starts at the worst cell */
      if (cell !== null && cell > (heat.cells[cursor.column][cursor.row] ?? -1)) Object.assign(cursor, { row, column });
    }));
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const palette = () => [colour("--faint"), ...[0, 1, 2, 3, 4, 5].map((step) => colour(`--f${step}`))];
    const width = () => (canvas.clientWidth - LABELS) / columns;
    const short = (name) => name.replace(/^layers\./, "L").replace("embed_tokens", "embed");
    const draw = () => {
      const ratio = devicePixelRatio || 1;
      canvas.style.height = `${rows * rowHeight + 2 * EDGE}px`;
      canvas.width = canvas.clientWidth * ratio;
      canvas.height = (rows * rowHeight + 2 * EDGE) * ratio;
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.translate(0, EDGE);
      const colours = palette();
      const step = width();
      heat.cells.forEach((cells, column) => {
        const left = LABELS + column * step;
        const gap = step > 4 ? 0.5 : 0;
        cells.forEach((cell, row) => {
          pen.fillStyle = colours[level(cell) + 1];
          pen.fillRect(left, row * rowHeight, step - gap + (gap ? 0 : 0.3), rowHeight - 0.5);
        });
        if (column && heat.sequences[column] !== heat.sequences[column - 1]) {
          pen.fillStyle = colour("--ink");
          pen.fillRect(left - 0.5, 0, 1, rows * rowHeight);
        }
      });
      pen.fillStyle = colour("--soft");
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const every = Math.ceil(14 / rowHeight);
      heat.layers.forEach((name, row) => {
        if (row % every === 0) pen.fillText(short(name), 0, (row + 0.5) * rowHeight, LABELS - 6);
      });
      if (cursor.shown) {
        pen.strokeStyle = colour("--ink");
        pen.lineWidth = 2;
        pen.strokeRect(LABELS + cursor.column * step - 1, cursor.row * rowHeight - 1, Math.max(4, step) + 2, rowHeight + 1);
      }
    };
    const words = (cell) => (cell === null ? "not compared" : cell >= NON_FINITE ? "not finite on one side" : `${show(cell)} noise floors`);
    const tell = () => {
      const { row, column } = cursor;
      byId("heat-readout").textContent = `${heat.layers[row]}, position ${heat.positions[column]} of ${heat.sequences[column]}` +
        `${heat.tokens[column] === null ? "" : `, token ${heat.tokens[column]}`}: ${words(heat.cells[column][row])}`;
    };
    const go = (row, column) => {
      cursor.row = Math.max(0, Math.min(rows - 1, row));
      cursor.column = Math.max(0, Math.min(columns - 1, column));
      cursor.shown = true;
      tell();
      draw();
    };
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -columns], End: [0, columns] };
    canvas.addEventListener("keydown", (event) => {
      if (!steps[event.key]) return;
      event.preventDefault();
      go(cursor.row + steps[event.key][0], cursor.column + steps[event.key][1]);
    });
    canvas.addEventListener("focus", () => go(cursor.row, cursor.column));
    canvas.addEventListener("mousemove", (event) => {
      const column = Math.floor((event.offsetX - LABELS) / width());
      if (column >= 0 && column < columns) go(Math.floor((event.offsetY - EDGE) / rowHeight), column);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("resize", draw);
    const bounds = [0, ...FLOORS];
    bounds.forEach((low, step) => {
      const item = make("span");
      const text = step === 0 ? `below ${bounds[1]}` : step + 1 < bounds.length ? `${low} – ${bounds[step + 1]}` : `${low} and more, not finite`;
      item.append(make("i", `f${step}`), text);
      byId("heat-legend").append(item);
    });
    byId("heat-legend").append("noise floors");
    const notes = [];
    if (columns < heat.of_tokens) notes.push(`${columns} of ${heat.of_tokens} tokens: the worst, and a sample of the others.`);
    if (rows < heat.of_layers) notes.push(`${rows} of ${heat.of_layers} layers.`);
    byId("heat-note").textContent = notes.join(" ");
    byId("heat-count").textContent = String(columns);
    byId("heat-details").addEventListener("toggle", () => fillHeatTable(heat, words), { once: true });
    byId("heat-block").hidden = false;
    draw();
  };
  const fillHeatTable = (heat, words) => {
    const head = make("tr");
    for (const name of ["sequence", "position", "token", ...heat.layers]) {
      const cell = make("th", name === "sequence" ? "" : "n", name);
      cell.scope = "col";
      head.append(cell);
    }
    byId("heat-data").tHead.append(head);
    const lines = heat.cells.map((cells, column) => {
      const line = make("tr");
      line.append(make("td", "", heat.sequences[column]), make("td", "n", String(heat.positions[column])), make("td", "n", show(heat.tokens[column])));
      for (const cell of cells) line.append(make("td", "n", cell !== null && cell >= NON_FINITE ? words(cell) : show(cell)));
      return line;
    });
    byId("heat-data").tBodies[0].append(...lines);
  };
  if (data.heat) buildHeat();

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
})();
