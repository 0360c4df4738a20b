// One head: what it is, its spectrum, its weights, its numbers.
const SHOWN = [RANK, ...["rank90", "rank95"].filter((id) => id !== RANK), "energy10", "stable_rank", "entropic_rank", "decay", "entropy", "entropy_share", "concentration", "largest", "sink",
  "offset_-1", "offset_0", "offset_1", "distance", "label_score", "position_share", "logit_std"];
const CODE = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const LEVEL = new Map([...CODE].map((character, i) => [character, i]));

// Two characters per value: log₁₀ σ from −8 to 4 in 4096 steps, at the indices of the grid and at the last index.
function decodeSpectrum(text, count) {
  const points = [];
  for (let i = 0; 2 * i < (text?.length ?? 0); i++) {
    const pair = text.slice(2 * i, 2 * i + 2);
    if (pair !== "..") points.push([2 * i + 2 === text.length ? count : heedful.data.grid[i], 10 ** (((64 * LEVEL.get(pair[0]) + LEVEL.get(pair[1])) / 4095) * 12 - 8)]);
  }
  return points;
}

function drawPanel() {
  const i = state.head, b = block(), kind = b.kind_of_head[i], layer = layerOf(i);
  const move = (by) => () => { select((i + by + SCAN.heads.length) % SCAN.heads.length); };
  const sort = layer.kind ? t("attention." + layer.kind) : "";
  const head = h("div", { class: "panel-head" },
    h("div", { class: "panel-title" },
      h("h3", { id: "panel-title", "aria-live": "polite" }, headName(i)),
      h("a", { class: "anchor", id: "head-link", href: anchorOf(i), title: t("head.link"), "aria-label": t("head.link") }, anchorOf(i)),
      h("div", { class: "steps" },
        h("button", { type: "button", class: "tool", id: "previous-head", "aria-label": t("previous"), title: t("previous"), onclick: move(-1) }, "‹"),
        h("button", { type: "button", class: "tool", id: "next-head", "aria-label": t("next"), title: t("next"), onclick: move(1) }, "›"))),
    kind ? h("p", {}, term(badge(kind), TEXT.kinds[kind][lang()][1]), term(patternText(i), t("pattern.about")), h("span", { class: "quiet" }, [sort, layer.name].filter(Boolean).join(" · "))) : null);
  const spectrum = h("figure", { class: "figure", id: "figure-spectrum" });
  const weights = h("figure", { class: "figure", id: "figure-weights" });
  const focused = document.activeElement?.id;
  const below = h("div", { class: "panel-numbers" }, numbers(i)), under = $("explore").classList.contains("side") && innerWidth >= 992;
  $("panel").replaceChildren(head, h("div", { class: "panel-spectrum" }, spectrum), h("div", { class: "panel-weights" }, weights), ...(under ? [] : [below]));
  $("under-map").replaceChildren(...(under ? [below] : [])); // if the map is beside the panel, the numbers go below the map
  if (["previous-head", "next-head", "head-link"].includes(focused)) $(focused).focus();
  drawSpectrum(spectrum, i);
  drawWeights(weights, i);
}

// The nearest pattern, always with the share of the head that it explains.
function patternText(i) {
  const b = block(), score = b.label_score?.[i], label = b.label?.[i], [agree, all] = [b.label_texts?.[i], b.texts?.[i]];
  if (label === "content") return t("pattern.free", { score: number(score, "share") });
  const some = agree < all ? t("pattern.texts", { agree, all }) : "";
  return t("pattern.named", { label: labelName(label), score: number(score, "share"), texts: some });
}

// Margins, ticks and lines of a plot with two logarithmic axes.
function logAxes({ width, height, x, y, left, bottom, top, right }) {
  const X = (v) => left + (Math.log(v / x[0]) / Math.log(x[1] / x[0])) * (width - left - right);
  const Y = (v) => height - bottom - (Math.log(v / y[0]) / Math.log(y[1] / y[0])) * (height - bottom - top);
  const decades = ([low, high]) => [...Array(Math.max(0, Math.floor(Math.log10(high) + 1e-9) - Math.ceil(Math.log10(low) - 1e-9) + 1)).keys()].map((k) => 10 ** (Math.ceil(Math.log10(low) - 1e-9) + k));
  const ticks = (range) => (decades(range).length > 2 ? decades(range) : [1, 2, 5].flatMap((f) => [...Array(14).keys()].map((k) => f * 10 ** (k - 8))).filter((v) => v >= range[0] && v <= range[1]));
  return { X, Y, decades, ticks, line: (points) => points.map(([a, v], k) => `${k ? "L" : "M"}${X(a).toFixed(1)} ${Y(v).toFixed(1)}`).join("") };
}
const plain = (v) => (v >= 0.001 && v < 10000 ? String(Number(v.toPrecision(1))) : "10" + [...String(Math.round(Math.log10(v)))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join(""));

// A legend above a plot: line samples and names; wraps if it is too wide.
function lineKey(entries, left, width) {
  const nodes = [];
  let x = left, y = 10;
  for (const { cls, text } of entries) {
    const room = 30 + textWidth(text) + 16;
    if (x + room > width + 16 && x > left) { x = left; y += 17; }
    nodes.push(s("path", { class: cls, d: `M${x} ${y - 4}h22` }), s("text", { x: x + 28, y }, text));
    x += room;
  }
  return { nodes, height: y + 8 };
}

function drawSpectrum(holder, i) {
  const b = block(), mine = decodeSpectrum(b.sigma?.[i], b.sigma_count[i]), random = decodeSpectrum(b.base_sigma?.[i], b.base_sigma_count[i]);
  if (mine.length < 2) { holder.replaceChildren(h("h4", {}, t("spectrum")), h("p", { class: "caption" }, t("spectrum.none"))); return; }
  const partner = OTHER ? otherSpectrum(i) : [];
  const width = Math.max(holder.clientWidth, 260), left = 40, right = 8, bottom = 32;
  const entries = [{ cls: "line-this", text: t("this.head") }];
  if (random.length) entries.push({ cls: "line-random", text: t("random.head") });
  if (partner.length) entries.push({ cls: "line-other", text: t("other.head", { name: OTHER.title }) });
  const key = lineKey(entries, left, width);
  const height = Math.round(Math.min(330, Math.max(210, width * 0.74))) + key.height, top = key.height + 14;
  const all = [...mine, ...random, ...partner];
  const most = Math.max(...all.map(([, v]) => v)), least = Math.max(Math.min(...all.map(([, v]) => v)), most * 1e-6);
  const axes = logAxes({ width, height, left, right, bottom, top, x: [1, Math.max(...all.map(([a]) => a))], y: [least / 1.15, most * 1.15] });
  const within = (points) => points.filter(([, v]) => v >= least);
  const rank = b[RANK]?.[i], last = Math.max(...all.map(([a]) => a));
  const nodes = [
    ...axes.ticks([least / 1.15, most * 1.15]).flatMap((v) => [s("path", { class: "axis", d: `M${left} ${axes.Y(v)}H${width - right}` }), s("text", { x: left - 7, y: axes.Y(v) + 4, "text-anchor": "end" }, plain(v))]),
    ...axes.ticks([1, Math.max(...all.map(([a]) => a))]).flatMap((v) => [s("path", { class: "axis", d: `M${axes.X(v)} ${height - bottom}v4` }), s("text", { x: axes.X(v), y: height - bottom + 16, "text-anchor": "middle" }, String(v))]),
    s("path", { class: "frame", d: `M${left} ${height - bottom}H${width - right}` }),
    s("text", { x: width - right, y: height - 2, "text-anchor": "end" }, t("spectrum.x")),
    s("text", { x: left - 7, y: top - 8, "text-anchor": "end" }, "σᵢ"),
  ];
  if (rank && rank >= 1 && rank <= last) {
    const x = axes.X(rank), far = x > (left + width) / 2;
    nodes.push(s("path", { class: "line-rank", d: `M${x} ${top}V${height - bottom}` }), s("text", { x: x + (far ? -6 : 6), y: height - bottom - 8, "text-anchor": far ? "end" : "start" }, t("rank.line", { rank: number(rank, "count") })));
  }
  nodes.push(s("path", { class: "line-random", d: axes.line(within(random)) }));
  if (partner.length) nodes.push(s("path", { class: "line-other", d: axes.line(within(partner)) }));
  nodes.push(s("path", { class: "line-this", d: axes.line(within(mine)) }), ...key.nodes);
  const svg = s("svg", { role: "img", "aria-label": `${headName(i)}. ${t("spectrum.label")}`, viewBox: `0 0 ${width} ${height}`, width, height }, ...nodes);
  figure(holder, `spectrum-L${SCAN.heads[i][0]}-H${SCAN.heads[i][1]}`, t("spectrum"), `${SCAN.title} · ${headName(i)} · ${t("spectrum")} · ${t("tokens", { n: SCAN.lengths[state.at] })}`, svg,
    h("figcaption", { class: "caption" }, [t("spectrum.first", { n: b.sigma_count[i] }), random.length ? t("random.about") : "", rank > last ? t("spectrum.beyond", { rank: number(rank, "count") }) : ""].filter(Boolean).join(lang() === "zh" ? "" : " ")));
}

// The picture of a head at the selected length.
function pictureOf(i) {
  const { shapes, heads } = SCAN.pictures[state.at];
  return heads[i] && { ...shapes[heads[i][0]], scale: heads[i][1], cells: heads[i][2] };
}

function drawWeights(holder, i) {
  const p = pictureOf(i), length = SCAN.tokens[state.at]?.length || SCAN.lengths[state.at];
  if (!p) { holder.replaceChildren(h("h4", {}, t("weights")), h("p", { class: "caption" }, t("weights.none"))); return; }
  const left = 20, top = 20, side = Math.min(Math.max(holder.clientWidth, 200) - left - 2, 320), tall = Math.round((side * p.rows) / p.columns);
  const canvas = h("canvas", { width: p.columns, height: p.rows }), paint = canvas.getContext("2d"), image = paint.createImageData(p.columns, p.rows);
  const stops = scaleStops();
  for (let c = 0; c < p.cells.length; c++) image.data.set([...ramp(stops, LEVEL.get(p.cells[c]) / 63), 255], 4 * c);
  paint.putImageData(image, 0, 0);
  const cross = s("path", { class: "cross" });
  const svg = s("svg", { role: "img", tabindex: 0, "aria-label": `${headName(i)}. ${t("weights.label")}`, viewBox: `0 0 ${left + side + 2} ${top + tall + 2}`, width: left + side + 2, height: top + tall + 2 },
    s("text", { x: left, y: 12 }, t("weights.keys") + " →"),
    s("text", { x: 12, y: top + 2, "text-anchor": "end", transform: `rotate(-90 12 ${top + 2})` }, "← " + t("weights.queries")),
    s("image", { x: left, y: top, width: side, height: tall, href: canvas.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated" }), cross);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, h("span", { class: "quiet" }, t("weights.hint")));
  let at = null;
  const read = (row, column) => {
    at = { row: Math.min(Math.max(row, 0), p.rows - 1), column: Math.min(Math.max(column, 0), p.columns - 1) };
    const x = left + ((at.column + 0.5) * side) / p.columns, y = top + ((at.row + 0.5) * tall) / p.rows;
    cross.setAttribute("d", `M${left} ${y}H${left + side}M${x} ${top}V${top + tall}`);
    const weight = p.scale * (LEVEL.get(p.cells[at.row * p.columns + at.column]) / 63) ** 2;
    const key = p.pooling === "none" ? "weights.value" : p.pooling === "max" ? "weights.most" : "weights.average";
    readout.replaceChildren(
      h("span", { class: "row" }, `${t("weights.query")} `, ...tokensOf(at.row, p, i)),
      h("span", { class: "row" }, `${t("weights.key")} `, ...tokensOf(at.column, p, i)),
      h("span", { class: "row" }, t(key, { value: number(weight, "share") })));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), zoom = box.width / (left + side + 2);
    const x = ((event.clientX - box.left) / zoom - left) / side, y = ((event.clientY - box.top) / zoom - top) / tall;
    if (x >= 0 && x < 1 && y >= 0 && y < 1) read(Math.floor(y * p.rows), Math.floor(x * p.columns));
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    if (at) read(at.row + by[0], at.column + by[1]); else read(0, 0);
  });
  const how = p.pooling === "none" ? "weights.exact" : p.pooling === "max" ? "weights.max" : "weights.mean";
  const caption = t(how, { rows: p.rows, columns: p.columns, per: number(p.per, "count"), scale: number(p.scale, "share") });
  figure(holder, `weights-L${SCAN.heads[i][0]}-H${SCAN.heads[i][1]}`, t("weights"), `${SCAN.title} · ${headName(i)} · ${t("weights")} · ${t("tokens", { n: length })}`, svg,
    h("figcaption", { class: "caption" }, `${t("weights.text", { length })}${lang() === "zh" ? "" : " "}${caption}`), readout);
}

// The tokens of a cell: their positions, and their text if it is known for this picture.
function tokensOf(cell, p, i) {
  const first = Math.ceil(cell * p.per - 1e-4), last = Math.max(first, Math.ceil((cell + 1) * p.per - 1e-4) - 1);
  const places = h("span", { class: "quiet" }, first === last ? String(first) : `${first}–${last}`);
  const tokens = SCAN.tokens[state.at] ?? [];
  if (layerOf(i).kind === "cross" || !tokens.length) return [places];
  return [places, " ", h("span", { class: "tokens" }, prose(tokens, first, last + 1))];
}

// Join pieces of words, for every way in which tokenizers mark the start of a word.
function prose(all, first, end) {
  const marked = all.some((token) => /^[Ġ▁]/.test(token)), tokens = all.slice(first, end);
  const text = marked ? tokens.map((token) => token.replace(/[Ġ▁]/g, " ").replaceAll("Ċ", "⏎")).join("") : tokens.join(" ").replaceAll(" ##", "");
  return text.length > 90 ? text.slice(0, 88) + "…" : text;
}

function numbers(i) {
  const b = block(), pairs = OTHER ? pairsHere() : null;
  const shown = SHOWN.map(measureOf).filter(Boolean);
  const hasIntervals = (b.texts?.[i] ?? 1) > 1;
  const heads = [h("th", { scope: "col" }), h("th", { scope: "col" }, t("value"))];
  if (hasIntervals) heads.push(h("th", { scope: "col" }, term(t("interval"), t("interval.about"))));
  heads.push(h("th", { scope: "col" }, term(t("random"), t("random.about"))));
  if (pairs) heads.push(h("th", { scope: "col" }, term(t("difference"), t("difference.about", { a: SCAN.title, b: OTHER.title }))));
  const rows = shown.flatMap((m) => {
    const cells = [h("th", { scope: "row" }, term(measureName(m.id), m[lang()][1])), h("td", {}, number(b[m.id]?.[i], m.format))];
    if (hasIntervals) cells.push(h("td", { class: "quiet" }, intervalText(b[m.id + "_low"]?.[i], b[m.id + "_high"]?.[i], m.format)));
    cells.push(h("td", { class: "quiet" }, m.base ? number(b[m.base]?.[i], m.format) : ""));
    if (pairs) cells.push(h("td", {}, pairs[m.id]?.[i] === undefined || pairs[m.id][i] === null ? "" : signed(pairs[m.id][i], m.format)));
    const row = h("tr", { class: m.id === state.measure ? "chosen" : null }, ...cells), sure = certified(m.id, i);
    if (!sure) return [row];
    return [row, h("tr", { class: "sub", "data-of": m.id }, h("th", { scope: "row" }, term(t("certified"), t("certified.about"))), h("td", {}, sure), h("td", { colspan: heads.length - 2 }))];
  });
  const note = hasIntervals ? t("interval.note", { n: b.texts[i] }) : t("interval.one");
  return h("div", {}, h("table", { class: "numbers" }, h("caption", {}, t("numbers")), h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)), h("p", { class: "caption" }, note));
}
