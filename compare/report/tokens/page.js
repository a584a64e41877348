"use strict";
(() => {
  const { byId, read, show, sortable } = probe;
  const data = read("report-data");

  /* Table of sequences. A click on a name shows the text of that sequence. */
  const { columns, rows } = data.sequences;
  const at = Object.fromEntries(columns.map((key, index) => [key, index]));
  const WHOLE = new Set(["step", "compared"]);
  const strips = new Map(data.strips.map((strip, index) => [strip.sequence, index]));
  const showStrip = (name) => {
    byId("strip-sequence").value = String(strips.get(name));
    byId("strip-sequence").dispatchEvent(new Event("change"));
    byId("strip-block").scrollIntoView();
    byId("strip-sequence").focus({ preventScroll: true });
  };
  const nameButton = (name) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = name;
    button.title = "Show its tokens";
    button.addEventListener("click", () => showStrip(name));
    return button;
  };
  const fillCell = (cell, row, key) => {
    const value = row[at[key]];
    if (key === "sequence" && strips.has(value)) cell.append(nameButton(value));
    else cell.textContent = WHOLE.has(key) && value !== null ? String(value) : show(value);
  };
  const left = data.left_out.table;
  if (byId("sequence-table")) {
    sortable({
      name: "sequence", noun: "sequences", columns, words: new Set(data.words), rows, fill: fillCell,
      start: columns.includes("mean_abs") ? "mean_abs" : "mean_prob_diff", falling: true,
      text: (row) => row[at.sequence],
      rank: (row, key) => row[at[key]],
      note: left ? `${left} sequences with smaller differences are left out.` : "",
    });
  }
  buildStrips(data);
})();
