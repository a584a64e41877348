"use strict";
/* Token strips: the text of one sequence, coloured by the difference of its log-probs. openCurve shows the layer curve
   of a token (null: the page has none). */
const buildStrips = (data, openCurve = null) => {
  const { byId, make, show } = probe;

  /* One focus stop, moved with the arrow keys. Steps in nats: 0.01 is usual for a healthy bf16 pair, 0.1 is where the
     training frameworks' own checks fail. A monitor stores probabilities only and gets no strips. */
  const STEPS = [0.001, 0.01, 0.03, 0.1, 1];
  const heat = (diff) => (diff === null ? 0 : STEPS.filter((step) => Math.abs(diff) >= step).length);
  /* What stands for a token: its text, else its id, else its position where a file has no ids. */
  const nameOf = (strip, index) => strip.text[index] ?? String(strip.token[index] ?? `#${strip.position[index]}`);
  const tokenNode = (strip, index, column) => {
    const response = strip.response[index] === "1";
    const level = heat(strip.diff[index] ?? strip.prob_diff[index]);
    const node = make("span", `${response ? "response" : "prompt"}${level ? ` h${level}` : ""}${strip.text[index] === null ? " ids" : ""}`,
      nameOf(strip, index));
    node.dataset.index = index;
    node.tabIndex = index ? -1 : 0;
    node.title = describe(strip, index);
    if (column !== undefined) {
      node.dataset.column = column;
      node.classList.add("has-curve");
      node.setAttribute("role", "button");
      node.setAttribute("aria-label", node.title);
    }
    return node;
  };
  const figures = (strip, index) => {
    const gap = strip.prob_diff[index] === null ? "" : `, probabilities ${show(strip.prob_diff[index])} apart`;
    if (strip.diff[index] !== null) {
      return `log-prob A ${show(strip.logprob_a[index], 4)}, B ${show(strip.logprob_b[index], 4)}, difference ${show(strip.diff[index])}${gap}`;
    }
    return gap ? gap.slice(2) : "no log-prob on both sides";
  };
  const describe = (strip, index) => {
    const text = strip.text[index] === null ? "" : ` “${strip.text[index]}”`;
    const token = strip.token[index] === null ? "" : `, token ${strip.token[index]}${text}`;
    const side = strip.response[index] === "1" ? "response" : "prompt";
    return `position ${strip.position[index]} (${side})${token}: ${figures(strip, index)}`;
  };
  const drawStrip = () => {
    const strip = data.strips[Number(byId("strip-sequence").value)];
    const nodes = [];
    const columns = new Map(openCurve ? strip.curves : []);
    strip.position.forEach((_, index) => {
      nodes.push(tokenNode(strip, index, columns.get(index)));
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
    if (openCurve) notes.push(`A click on an underlined token, or Enter, shows its layer curve: ${strip.curves.length} of the tokens shown have one, those whose row is in the heat map.`);
    if (!data.text && strip.token.some((token) => token !== null)) notes.push("Token ids are shown: the report was made without token text.");
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
  const showCurve = (event) => {
    const node = event.target.closest("[data-index]");
    if (!openCurve || !node || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    const strip = data.strips[Number(byId("strip-sequence").value)];
    const index = Number(node.dataset.index);
    if (node.dataset.column === undefined) {
      byId("strip-readout").textContent = `${node.title}. No layer curve: the row that scores it is not in the heat map.`;
      return;
    }
    const name = strip.text[index] === null ? nameOf(strip, index) : `“${strip.text[index]}”`;
    openCurve(Number(node.dataset.column), `${name} at position ${strip.position[index]} of ${strip.sequence}`, byId("strip"), node);
  };
  const build = () => {
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
    byId("strip").addEventListener("keydown", showCurve);
    byId("strip").addEventListener("click", showCurve);
    byId("strip").addEventListener("focusin", readOut);
    byId("strip").addEventListener("mouseover", readOut);
    drawStrip();
    byId("strip-block").hidden = false;
  };
  if (data.strips.some((strip) => strip.position.length)) build();
};
