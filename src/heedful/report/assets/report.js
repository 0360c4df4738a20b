// The main script: controls, selection, and redrawing after changes.
const anchorOf = (i) => `#L${SCAN.heads[i][0]}H${SCAN.heads[i][1]}`;

// The head named in the URL, such as #L2H3; null if there is no such head.
function addressed() {
  const found = /^#L(\d+)H(\d+)$/i.exec(location.hash);
  return found ? (INDEX.get(`${Number(found[1])}:${Number(found[2])}`) ?? null) : null;
}

function select(i, from = null) {
  state.head = i;
  history.replaceState(null, "", anchorOf(i));
  grids.forEach((each) => each.select(i, each === from));
  drawPanel();
  drawGrowth();
  if (OTHER) { const m = measureOf(state.measure) ?? measureOf(RANK); if (known(differences(m).values).length) drawScatter(m); }
  markRow();
}

function drawControls() {
  document.querySelectorAll("[data-t]").forEach((node) => { node.textContent = t(node.dataset.t); });
  const groups = [...new Set(MEASURES.map((m) => m.group))];
  $("measure").replaceChildren(h("option", { value: "kind" }, t("kind")),
    ...groups.map((group) => h("optgroup", { label: TEXT.groups[group][lang()] }, ...MEASURES.filter((m) => m.group === group).map((m) => h("option", { value: m.id }, measureName(m.id))))));
  $("measure").value = state.measure;
  $("measure-about").textContent = state.measure === "kind" ? t("kind.about") : measureOf(state.measure)[lang()][1];
  $("length-control").hidden = SCAN.lengths.length < 2;
  $("length").replaceChildren(...SCAN.lengths.map((n, at) => h("option", { value: at }, t("tokens", { n }))));
  $("length").value = state.at;
  $("layer").replaceChildren(h("option", { value: "" }, t("table.layers")), ...LAYERS.map((layer) => h("option", { value: layer }, String(layer))));
  $("layer").value = state.layer;
  $("query").placeholder = t("table.placeholder");
  $("csv").title = t("table.csv.all");
  $("chips").setAttribute("aria-label", t("kind"));
  const focused = document.activeElement?.closest?.(".chip")?.dataset.kind;
  $("chips").replaceChildren(...KINDS.map((kind) => h("button", { type: "button", class: "chip", "data-kind": kind, "aria-pressed": String(state.kinds.has(kind)), onclick: () => toggle(kind) }, glyph(kind), kindName(kind))));
  if (focused) [...$("chips").children].find((chip) => chip.dataset.kind === focused)?.focus();
  drawCards();
}

// The counts on the cards, like the map, are for the selected length.
function drawCards() {
  const kinds = block().kind_of_head, all = known(kinds.map((kind) => KINDS.indexOf(kind))).length || 1;
  $("cards-head").textContent = t(OTHER ? "cards.head.two" : "cards.head", { n: SCAN.lengths[state.at], a: SCAN.title, b: OTHER?.title });
  document.querySelectorAll(".card").forEach((card) => {
    const kind = card.dataset.kind, of = (values) => (values ?? []).filter((each) => each === kind).length, count = of(kinds);
    const beside = OTHER && otherBlock() ? t("cards.other", { name: OTHER.title, n: of(otherBlock().kind_of_head) }) : `${((100 * count) / all).toFixed(0)}\u202f%`;
    card.querySelector(".card-count").replaceChildren(`${count} `, h("span", { class: "card-share" }, beside));
    card.setAttribute("aria-pressed", String(state.kinds.has(kind)));
  });
}

function toggle(kind) {
  if (!state.kinds.delete(kind)) state.kinds.add(kind);
  drawFiltered();
}
function drawFiltered() {
  drawControls();
  drawMap();
  drawGrowth();
  drawCompare();
  drawTable();
}
function draw() {
  drawFiltered();
  drawPanel();
  drawFacts();
}

function drawFacts() {
  const rows = [];
  const add = (key, ...values) => { if (values.some(Boolean)) rows.push(h("dt", {}, t(key)), h("dd", {}, values.filter(Boolean).join(" · "))); };
  for (const scan of [SCAN, OTHER].filter(Boolean)) {
    const layers = new Set(scan.heads.map(([layer]) => layer)).size, kinds = [...new Set(scan.layers.map((l) => l.kind).filter(Boolean))];
    const shared = scan.layers.find((l) => l.kv_heads && l.kv_heads !== l.heads);
    add("how.model", scan.manifest.model, scan.manifest.model_type);
    add("how.layers", t("how.layers.value", { layers, heads: scan.heads.length }), ...kinds.map((kind) => t("attention." + kind)), shared ? t("how.kv", { kv: shared.kv_heads, heads: shared.heads }) : "");
    const titles = scan.texts.map((text) => text.title || text.id).filter(Boolean).map((title) => `“${title}”`);
    add("how.texts", scan.texts.length < scan.planned ? t("how.texts.some", { n: scan.texts.length, all: scan.planned }) : String(scan.texts.length), titles.slice(0, 4).join(", ") + (titles.length > 4 ? ", " + t("and.more", { n: titles.length - 4 }) : ""));
    add("how.lengths", scan.lengths.map((n) => t("tokens", { n })).join(", "));
    add("how.device", scan.manifest.device);
    add("how.versions", Object.entries(scan.manifest.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", "));
    add("how.time", scan.seconds ? t("how.seconds", { n: number(scan.seconds) }) : "");
    add("how.fingerprint", scan.manifest.fingerprint);
  }
  $("facts").replaceChildren(...rows);
  $("glossary-kinds").replaceChildren(...KINDS.flatMap((kind) => [h("dt", {}, badge(kind)), h("dd", {}, TEXT.kinds[kind][lang()][1])]));
  $("glossary-measures").replaceChildren(...MEASURES.filter((m) => m.group !== "base").flatMap((m) => [h("dt", {}, measureName(m.id)), h("dd", {}, m[lang()][1])]), h("dt", {}, t("certified")), h("dd", {}, t("certified.about")), h("dt", {}, t("random")), h("dd", {}, t("random.about")));
}

// With many layers the map is beside the panel; with few, above it.
$("explore").classList.add(LAYERS.length > 12 ? "side" : "wide");
$("measure").addEventListener("change", (event) => { state.measure = event.target.value; draw(); });
$("length").addEventListener("change", (event) => { state.at = Number(event.target.value); draw(); });
$("layer").addEventListener("change", (event) => { state.layer = event.target.value; drawFiltered(); });
$("query").addEventListener("input", (event) => { state.query = event.target.value; drawFiltered(); });
$("clear").addEventListener("click", () => { state.kinds.clear(); state.query = $("query").value = ""; state.layer = ""; drawFiltered(); });
$("csv").addEventListener("click", saveTable);
$("table").addEventListener("click", (event) => { const row = event.target.closest("tr[data-row]"); if (row) select(Number(row.dataset.row)); });
document.querySelectorAll(".card").forEach((card) => card.addEventListener("click", () => toggle(card.dataset.kind)));
let wide = innerWidth, waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === wide) return; // a phone's address bar changes only the height
  wide = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(draw, 120);
});
heedful.onChange(draw);
addEventListener("hashchange", () => { const i = addressed(); if (i !== null && i !== state.head) { select(i); $("panel").scrollIntoView(); } });
const linked = addressed();
if (linked !== null) state.head = linked;
draw();
if (linked !== null) $("panel").scrollIntoView();
