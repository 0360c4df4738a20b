// Two scans: differences head by head, paired text by text.
const OTHER_INDEX = new Map((OTHER?.heads ?? []).map(([layer, head], i) => [layer + ":" + head, i]));
const otherBlock = () => OTHER?.blocks[OTHER.lengths.indexOf(SCAN.lengths[state.at])] ?? null;
const inOther = (i) => OTHER_INDEX.get(SCAN.heads[i].join(":"));
const otherSpectrum = (i) => decodeSpectrum(otherBlock()?.sigma?.[inOther(i)], otherBlock()?.sigma_count[inOther(i)]);
const pairsHere = () => heedful.data.pairs[state.at];

// Paired differences by text; differences of means if no texts are shared.
function differences(m) {
  const pairs = pairsHere(), there = otherBlock();
  if (pairs[m.id]) return { values: pairs[m.id], low: pairs[m.id + "_low"] ?? null, high: pairs[m.id + "_high"] ?? null, paired: Boolean(pairs[m.id + "_low"]) };
  const values = SCAN.heads.map((_, i) => {
    const [a, b] = [block()[m.id]?.[i], there?.[m.id]?.[inOther(i)]];
    return a === null || a === undefined || b === null || b === undefined ? null : a - b;
  });
  return { values, low: null, high: null, paired: false };
}

function drawCompare() {
  if (!OTHER) return;
  $("compare-title").textContent = t("compare.title");
  const m = measureOf(state.measure) ?? measureOf(RANK), found = differences(m), values = found.values;
  const names = { measure: measureName(m.id), a: SCAN.title, b: OTHER.title };
  $("compare-about").textContent = t(found.paired ? "compare.about" : "compare.unpaired", names);
  const some = known(values);
  if (!some.length) {
    $("compare-words").textContent = t("compare.none");
    for (const id of ["figure-differences", "figure-scatter"]) $(id).replaceChildren();
    drawKinds();
    return;
  }
  const sure = (i) => (found.paired ? found.low[i] > 0 || found.high[i] < 0 : true);
  const there = values.map((v, i) => [v, i]).filter(([v]) => v !== null && v !== undefined);
  const up = there.filter(([v, i]) => v > 0 && sure(i)).length, down = there.filter(([v, i]) => v < 0 && sure(i)).length;
  $("compare-words").textContent = t(found.paired ? "compare.words" : "compare.words.plain", { n: SCAN.lengths[state.at], up, down, all: there.length, flat: there.length - up - down });

  const most = Math.max(...some.map(Math.abs)) || 1, stops = apart();
  const words = (i) => {
    const range = found.low ? intervalText(found.low[i], found.high[i], m.format) : "";
    return values[i] === null || values[i] === undefined ? "–" : `${measureName(m.id)} ${signed(values[i], m.format)}${range ? ` (${range})` : ""}`;
  };
  grid($("figure-differences"), {
    name: `difference-${m.id}`, heading: `${SCAN.title} − ${OTHER.title}`, title: `${SCAN.title} − ${OTHER.title} · ${measureName(m.id)}`, label: `${measureName(m.id)}. ${t("compare.label")}`, words, tip: words,
    legend: rampLegend(stops, [-1, 0, 1].map((x) => ({ at: (x + 1) / 2, text: signed(x * most, m.format) }))),
    fill: (i) => (values[i] === null || values[i] === undefined ? null : ramp(stops, (values[i] / most + 1) / 2)),
    mark: (i, { x, y, width, height, ink }) => (found.paired && sure(i) ? [s("circle", { cx: x + width / 2, cy: y + height / 2, r: Math.min(width, height) * 0.13, fill: ink, "pointer-events": "none" })] : []),
  });
  drawScatter(m);
  drawKinds();
}

function drawScatter(m) {
  const holder = $("figure-scatter"), there = otherBlock();
  const points = SCAN.heads.map((_, i) => [there?.[m.id]?.[inOther(i)], block()[m.id]?.[i], i]).filter(([a, b]) => known([a, b]).length === 2);
  const scale = scaleOf(points.flatMap(([a, b]) => [a, b]), m), side = Math.min(Math.max(holder.clientWidth, 240), 420), left = 46, bottom = 40, top = 8, right = 10;
  const inner = side - left - right, X = (v) => left + scale.share(v) * inner, Y = (v) => top + (1 - scale.share(v)) * inner, height = top + inner + bottom;
  const marks = points.map(([a, b, i]) => {
    const kind = block().kind_of_head[i];
    return s("path", { class: "mark", "data-i": i, "data-kind": kind, d: heedful.data.glyphs[kind], transform: `translate(${X(a) - 6} ${Y(b) - 6}) scale(0.75)`, stroke: "var(--kind)", fill: kind === "low rank" ? "var(--kind)" : "none", "stroke-width": 2.2, "stroke-linecap": "round", opacity: matches(i) ? 1 : 0.15 });
  });
  const ticks = [0, 0.5, 1].map((u) => scale.at(u));
  const chosen = points.find(([, , i]) => i === state.head);
  const svg = s("svg", { role: "img", "aria-label": `${measureName(m.id)}: ${OTHER.title}, ${SCAN.title}`, viewBox: `0 0 ${side} ${height}`, width: side, height },
    s("path", { class: "zero", d: `M${left} ${top + inner}L${left + inner} ${top}` }),
    s("path", { class: "frame", d: `M${left} ${top}V${top + inner}H${left + inner}` }),
    ...ticks.flatMap((v, k) => [s("text", { x: X(v), y: top + inner + 17, "text-anchor": k === 2 ? "end" : "middle" }, number(v, m.format)), s("text", { x: left - 7, y: Y(v) + 4, "text-anchor": "end" }, number(v, m.format))]),
    s("text", { x: left + inner, y: height - 4, "text-anchor": "end" }, OTHER.title + " →"),
    s("text", { x: left + 6, y: top + 10 }, "↑ " + SCAN.title), ...marks,
    chosen ? s("circle", { class: "ring", cx: X(chosen[0]), cy: Y(chosen[1]), r: 9 }) : null);
  svg.addEventListener("click", (event) => { const i = indexOf(event); if (i !== null) select(i); });
  svg.addEventListener("pointermove", (event) => { const i = indexOf(event); if (i === null) tip.hide(event); else tip.show(event, `${headName(i)}\n${SCAN.title}: ${number(block()[m.id][i], m.format)}\n${OTHER.title}: ${number(there[m.id][inOther(i)], m.format)}`); });
  svg.addEventListener("pointerleave", tip.hide);
  figure(holder, `scatter-${m.id}`, t("compare.scatter"), `${measureName(m.id)} · ${OTHER.title} · ${SCAN.title}`, svg, h("figcaption", { class: "caption" }, t("compare.scatter.about", { a: SCAN.title, b: OTHER.title })));
}

function drawKinds() {
  const there = otherBlock(), here = block();
  if (!there?.kind_of_head) { $("compare-kinds").replaceChildren(); return; }
  const count = (from, to) => SCAN.heads.filter((_, i) => there.kind_of_head[inOther(i)] === from && here.kind_of_head[i] === to).length;
  const rows = KINDS.map((from) => h("tr", {}, h("th", { scope: "row" }, badge(from)), ...KINDS.map((to) => {
    const n = count(from, to);
    return h("td", { class: [from === to ? "same" : "", n ? "" : "nil"].join(" ").trim() || null }, String(n));
  })));
  $("compare-kinds").replaceChildren(
    h("h3", {}, t("compare.kinds")), h("p", { class: "caption" }, t("compare.kinds.about", { a: SCAN.title, b: OTHER.title })),
    h("table", { class: "cross-table" }, h("thead", {}, h("tr", {}, h("th", {}), ...KINDS.map((kind) => h("th", { scope: "col" }, kindName(kind))))), h("tbody", {}, ...rows)));
}
