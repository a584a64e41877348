"use strict";
(() => {
  const { byId, read, make, show, sortable } = probe;
  const data = read("report-data");

  /* Module table. */
  const columns = data.modules.columns;
  const at = Object.fromEntries(columns.map((key, index) => [key, index]));
  const WHOLE = new Set(["order", "bad", "rows"]);
  const isFirst = (row) => row.length > columns.length;
  const breakable = (name) => name.split(/(?<=\.)/).flatMap((part) => [make("wbr"), part]);
  const fillCell = (cell, row, key) => {
    const value = row[at[key]];
    if (key === "verdict") cell.append(make("span", `badge ${value}`, value));
    else if (key === "name") {
      cell.className = "mono";
      cell.append(...breakable(value));
      if (isFirst(row)) cell.append(" ", make("span", "first", "first divergence"));
    } else cell.textContent = WHOLE.has(key) && value !== null ? String(value) : show(value);
  };
  const buildTable = () => {
    const select = byId("verdict-filter");
    const rows = data.modules.rows;
    select.append(new Option(`all (${rows.length})`, ""));
    for (const verdict of data.verdicts) {
      const count = rows.filter((row) => row[at.verdict] === verdict).length;
      if (count) select.append(new Option(`${verdict} (${count})`, verdict));
    }
    const restart = sortable({
      name: "module", noun: "modules", columns, words: new Set(data.words), rows, start: "order", fill: fillCell,
      text: (row) => row[at.name],
      keeps: (row) => !select.value || row[at.verdict] === select.value,
      rank: (row, key) => (key === "verdict" ? data.verdicts.indexOf(row[at.verdict]) : row[at[key]]),
      look: (row) => (isFirst(row) ? "is-first" : ""),
      note: data.left_out.modules ? `${data.left_out.modules} modules with the smallest error are left out; report.csv has all.` : "",
    });
    select.addEventListener("change", restart);
  };
  if (byId("module-table")) buildTable();
  buildStrips(data, buildCurves(data.heat));

  /* Heat map: drawn on a canvas in the page's colours; a cursor moves over it with the arrow keys. */
  const LABELS = 58;
  const EDGE = 4;
  const buildHeat = () => {
    const heat = data.heat;
    const canvas = byId("heat-map");
    const rows = heat.layers.length;
    const columns = heat.tokens.length;
    const level = (cell) => (cell === null ? -1 : floors.level(cell));
    const rowHeight = Math.max(7, Math.min(18, Math.floor(420 / rows)));
    const cursor = { row: 0, column: 0, shown: false };
    heat.cells.forEach((cells, column) => cells.forEach((cell, row) => {
      /* the cursor starts at the worst cell */
      if (cell !== null && cell > (heat.cells[cursor.column][cursor.row] ?? -1)) Object.assign(cursor, { row, column });
    }));
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const palette = () => [colour("--faint"), ...[0, 1, 2, 3, 4, 5].map((step) => colour(`--f${step}`))];
    const width = () => (canvas.clientWidth - LABELS) / columns;
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
        if (row % every === 0) pen.fillText(floors.short(name), 0, (row + 0.5) * rowHeight, LABELS - 6);
      });
      if (cursor.shown) {
        pen.strokeStyle = colour("--ink");
        pen.lineWidth = 2;
        pen.strokeRect(LABELS + cursor.column * step - 1, cursor.row * rowHeight - 1, Math.max(4, step) + 2, rowHeight + 1);
      }
    };
    const tell = () => {
      const { row, column } = cursor;
      byId("heat-readout").textContent = `${heat.layers[row]}, position ${heat.positions[column]} of ${heat.sequences[column]}` +
        `${heat.tokens[column] === null ? "" : `, token ${heat.tokens[column]}`}: ${floors.words(heat.cells[column][row])}`;
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
    const bounds = [0, ...floors.STEPS];
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
    byId("heat-details").addEventListener("toggle", () => fillHeatTable(heat), { once: true });
    byId("heat-block").hidden = false;
    draw();
  };
  const fillHeatTable = (heat) => {
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
      for (const cell of cells) line.append(make("td", "n", cell !== null && cell >= floors.NON_FINITE ? floors.words(cell) : show(cell)));
      return line;
    });
    byId("heat-data").tBodies[0].append(...lines);
  };
  if (data.heat) buildHeat();
})();
