// All heads as a table: sorted by a column, filtered by kind, layer and words, saved as CSV.
const COLUMNS = [RANK, "base_" + RANK, "rank95", "energy10", "stable_rank", "entropy_share", "largest", "sink", "distance", "label_score"].filter(measureOf);
const DIFFERENCE_AFTER = measureOf("base_" + RANK) ? "base_" + RANK : RANK;

function columnValue(by, i) {
  const b = block();
  if (by === "layer" || by === "head") return SCAN.heads[i][by === "layer" ? 0 : 1];
  if (by === "kind") return KINDS.indexOf(b.kind_of_head[i]);
  if (by === "label") return patternName(i);
  if (by === "difference") return differences(measureOf(RANK)).values[i];
  return b[by]?.[i];
}

// Missing values come last in both sort directions; equal values keep the order of the model.
function sorted() {
  const { by, down } = state.sort, rows = SCAN.heads.map((_, i) => i).filter(matches);
  const value = by === "difference" ? ((all) => (i) => all[i])(differences(measureOf(RANK)).values) : (i) => columnValue(by, i);
  const missing = (v) => v === null || v === undefined || v === "";
  return rows.map((i) => [value(i), i]).sort(([a, i], [b, j]) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b) || i - j;
    const order = typeof a === "string" ? a.localeCompare(b, lang()) : a - b;
    return (down ? -order : order) || i - j;
  }).map(([, i]) => i);
}

function drawTable() {
  const b = block(), rows = sorted();
  const difference = OTHER ? differences(measureOf(RANK)).values : null;
  const columns = [
    { id: "layer", name: t("layer"), cls: "slim" }, { id: "head", name: t("head"), cls: "slim" }, { id: "kind", name: t("kind.column"), cls: "text", about: t("kind.about") }, { id: "label", name: t("label.column"), cls: "text", about: t("pattern.about") },
    ...COLUMNS.map((id) => ({ id, name: measureOf(id).short[lang()], about: measureOf(id)[lang()].join(": ") })),
  ];
  if (difference) columns.splice(4 + COLUMNS.indexOf(DIFFERENCE_AFTER) + 1, 0, { id: "difference", name: `Δ ${measureOf(RANK).short[lang()]}`, about: `${t("difference")}: ${measureName(RANK)}` });
  const head = columns.map(({ id, name, cls, about }) => {
    const on = state.sort.by === id;
    const act = () => { state.sort = { by: id, down: on ? !state.sort.down : !["layer", "head", "kind", "label"].includes(id) }; drawTable(); document.querySelector(`#table [data-sort="${id}"]`).focus(); };
    return h("th", { scope: "col", class: cls, "aria-sort": on ? (state.sort.down ? "descending" : "ascending") : null },
      explain(h("button", { type: "button", "data-sort": id, onclick: act }, name, h("span", { class: "arrow", "aria-hidden": "true" }, on ? (state.sort.down ? "↓" : "↑") : "")), about));
  });
  const body = rows.map((i) => h("tr", { "data-row": i, "aria-selected": String(i === state.head) },
    h("td", {}, h("button", { type: "button", class: "link", "aria-label": headName(i) }, String(SCAN.heads[i][0]))),
    h("td", {}, String(SCAN.heads[i][1])),
    h("td", { class: "text" }, b.kind_of_head[i] ? badge(b.kind_of_head[i]) : "–"),
    h("td", { class: "text" }, patternName(i)),
    ...COLUMNS.flatMap((id) => [h("td", { title: intervalText(b[id + "_low"]?.[i], b[id + "_high"]?.[i], measureOf(id).format) || null }, number(b[id]?.[i], measureOf(id).format), !isExact(id, i) && certified(id, i) ? h("span", { class: "sure" }, certified(id, i)) : null), difference && id === DIFFERENCE_AFTER ? h("td", {}, difference[i] === null || difference[i] === undefined ? "–" : signed(difference[i], "count")) : null])));
  $("table").setAttribute("aria-label", t("table.label"));
  $("table-scroll").setAttribute("aria-label", t("table.label"));
  $("table").replaceChildren(h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...(body.length ? body : [h("tr", {}, h("td", { class: "empty", colspan: columns.length }, t("table.none")))])));
  const sure = COLUMNS.some((id) => SCAN.heads.some((_, i) => certified(id, i)));
  $("table-terms").replaceChildren(
    ...COLUMNS.flatMap((id) => [h("dt", {}, measureOf(id).short[lang()]), h("dd", {}, measureOf(id)[lang()].join(lang() === "zh" ? "：" : ": "))]),
    ...(sure ? [h("dt", {}, t("certified")), h("dd", {}, t("certified.about"))] : []));
  $("table-count").textContent = `${t("table.count", { shown: rows.length, all: SCAN.heads.length })} · ${t("tokens", { n: SCAN.lengths[state.at] })}`;
}

function markRow() {
  document.querySelectorAll("#table tbody tr[data-row]").forEach((row) => row.setAttribute("aria-selected", String(Number(row.dataset.row) === state.head)));
}

// All columns at all lengths for the heads that pass the filter, for both scans if there are two.
function saveTable() {
  const heads = sorted(), columns = MEASURES.flatMap((m) => ["", "_low", "_high", "_certified_low", "_certified_high"].map((end) => m.id + end)).filter((id) => SCAN.blocks.some((b) => b[id]));
  const lines = [["model", "length", "layer", "head", "name", "attention", "kind", "label", "texts", ...columns]];
  const add = (scan, where) => scan.blocks.forEach((b, at) => heads.forEach((k) => {
    const i = where(k), layer = scan.layers.find((l) => l.layer === scan.heads[i]?.[0]) ?? {};
    if (i !== undefined) lines.push([scan.title, scan.lengths[at], ...scan.heads[i], layer.name, layer.kind, b.kind_of_head[i], b.label?.[i], b.texts?.[i], ...columns.map((id) => b[id]?.[i])]);
  }));
  add(SCAN, (i) => i);
  if (OTHER) add(OTHER, inOther);
  save(`${SCAN.title}-heads.csv`.replace(/[^\w.-]+/g, "-"), new Blob([csvText(lines)], { type: "text/csv;charset=utf-8" }));
}
