// State, texts, numbers and colours of the page. Data enter the page only as text nodes and attributes.
const SCAN = heedful.data.scans[0];
const OTHER = heedful.data.scans[1] ?? null;
const TEXT = heedful.data.text;
const RANK = heedful.data.rank; // the rank in the answer; the map has its own choice of measure
const KINDS = Object.keys(TEXT.kinds);
const MEASURES = TEXT.measures.filter((m) => SCAN.blocks.some((b) => b[m.id]?.some((x) => x !== null)));
const LAYERS = [...new Set(SCAN.heads.map(([layer]) => layer))];
const INDEX = new Map(SCAN.heads.map(([layer, head], i) => [layer + ":" + head, i]));

const state = {
  measure: OTHER ? RANK : "kind",
  at: SCAN.blocks.length - 1, // which length
  head: 0,
  kinds: new Set(),
  query: "",
  layer: "",
  sort: { by: "layer", down: false },
};
const block = () => SCAN.blocks[state.at];
const measureOf = (id) => MEASURES.find((m) => m.id === id);

// words
const lang = () => heedful.language();
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, key) => values[key] ?? "");
const t = (key, values = {}) => fill(TEXT.ui[key][lang()], values);
const kindName = (kind) => TEXT.kinds[kind]?.[lang()][0] ?? kind ?? "";
const labelName = (label) => TEXT.labels[label]?.[lang()] ?? label ?? "";
const measureName = (id) => (id === "kind" ? t("kind") : measureOf(id)[lang()][0]);
const patternName = (i) => (block().label?.[i] === "content" ? t("pattern.none") : labelName(block().label?.[i]));
const headName = (i) => t("layer.head", { layer: SCAN.heads[i][0], head: SCAN.heads[i][1] });
const layerOf = (i) => SCAN.layers.find((l) => l.layer === SCAN.heads[i][0]) ?? {};

// numbers
function number(x, format = "number") {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  let text;
  if (size === 0 && format !== "share") return "0";
  if (format === "share") text = size > 0 && size < 0.0095 ? (size < 0.0005 ? "0.000" : x.toFixed(3)) : x.toFixed(2);
  else if (format === "count") text = size >= 99.95 ? x.toFixed(0) : x.toFixed(1); // as in the answer
  else if (size >= 100) text = x.toFixed(0);
  else if (size >= 10) text = x.toFixed(1);
  else if (size >= 0.01) text = x.toFixed(2);
  else text = x.toPrecision(2);
  return text.replace("-", "−");
}
const signed = (x, format) => (x > 0 ? "+" : "") + number(x, format);
const intervalText = (low, high, format) =>
  low === null || low === undefined || high === null || high === undefined ? "" : `${number(low, format)} – ${number(high, format)}`;
// The certified bounds of a rank, averaged over texts, or a note that it is exact.
function certified(id, i) {
  const [low, high] = ["_low", "_high"].map((side) => block()[`${id}_certified${side}`]?.[i]);
  if (low === null || low === undefined || high === null || high === undefined) return "";
  return low === high ? t("exact") : intervalText(low, high, "count");
}
const isExact = (id, i) => block()[id + "_certified_low"]?.[i] === block()[id + "_certified_high"]?.[i];
const quantile = (sorted, share) => {
  if (!sorted.length) return NaN;
  const at = share * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
};
const known = (values) => values.filter((x) => x !== null && x !== undefined && Number.isFinite(x));

// elements
function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {}))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const $ = (id) => document.getElementById(id);
const glyph = (kind) =>
  s("svg", { class: "glyph", "data-kind": kind, viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: heedful.data.glyphs[kind] }));
const badge = (kind) => h("span", { class: "badge" }, glyph(kind), kindName(kind));
const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 11.5) {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// A term with an explanation on hover, focus or tap.
function term(name, about, attributes = {}) {
  return explain(h("button", { type: "button", class: "term", ...attributes }, name), about);
}
function explain(node, about) {
  if (!about) return node;
  const beside = () => { const box = node.getBoundingClientRect(); tip.show({ clientX: box.left - 14, clientY: box.bottom - 12 }, about, node); };
  node.setAttribute("aria-description", about);
  for (const event of ["pointerenter", "focus", "click"]) node.addEventListener(event, beside);
  for (const event of ["pointerleave", "blur"]) node.addEventListener(event, tip.hide);
  return node;
}

// colours: cividis, which reads the same with and without colour vision; a pair of blue and orange about zero
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const APART = {
  light: ["#1f5a99", "#5f98c9", "#a9c6dd", "#cfcabd", "#eabf92", "#dd9450", "#a85306"],
  dark: ["#8cc4f5", "#5b97cd", "#4a7197", "#5a5a58", "#8a6340", "#bf8247", "#f5b06a"],
};
// Colours of numbers differ from the page's background; only cells that were not measured are hatched.
const scaleStops = () => (heedful.isDark() ? CIVIDIS.slice(2) : CIVIDIS);
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function ramp(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [rgb(stops[low]), rgb(stops[low + 1])];
  return a.map((x, i) => Math.round(x + (at - low) * (b[i] - x)));
}
const css = (colour) => `rgb(${colour.join(",")})`;
const inkOn = (colour) => (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 138 ? "#16181b" : "#ffffff");
const apart = () => APART[heedful.isDark() ? "dark" : "light"];
const kindColour = (kind) =>
  rgb({ positional: ["#0b6aa8", "#5aaee6"], sink: ["#d9772e", "#f0944d"], "low rank": ["#0a7f5e", "#45c49b"], content: ["#8f63ad", "#a97fc9"] }[kind][heedful.isDark() ? 1 : 0]);

// scales
function scaleOf(values, measure) {
  const found = known(values);
  let low = found.length ? Math.min(...found) : 0, high = found.length ? Math.max(...found) : 1;
  const log = measure.scale === "log" && low > 0 && high / low > 4;
  if (!log && measure.format === "share") { low = Math.min(0, low); high = Math.max(1, high); }
  if (low === high) high = low + (low === 0 ? 1 : Math.abs(low) * 0.1);
  const share = log ? (x) => Math.log(x / low) / Math.log(high / low) : (x) => (x - low) / (high - low);
  const at = log ? (u) => low * (high / low) ** u : (u) => low + u * (high - low);
  return { low, high, log, share, at };
}

// heads that pass the filter
function matches(i) {
  const b = block();
  if (state.kinds.size && !state.kinds.has(b.kind_of_head[i])) return false;
  if (state.layer !== "" && String(SCAN.heads[i][0]) !== state.layer) return false;
  const place = /^l(\d+)(?:\s*h(\d+))?$/i.exec(state.query.trim());
  if (place) return SCAN.heads[i][0] === Number(place[1]) && (place[2] === undefined || SCAN.heads[i][1] === Number(place[2]));
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [kindName(b.kind_of_head[i]), b.kind_of_head[i], b.label?.[i], patternName(i), layerOf(i).name, layerOf(i).kind, headName(i)];
  const whole = text.filter(Boolean).join(" ").toLowerCase();
  return words.every((word) => whole.includes(word));
}

// one tooltip for all figures
const tip = {
  owner: null, // the element that shows it; an element hides only its own tooltip
  show(event, text, owner = event.currentTarget) {
    const box = $("tip");
    tip.owner = owner;
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - width - 8);
    const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18;
    box.style.left = Math.max(8, left) + "px";
    box.style.top = Math.max(8, top) + "px";
  },
  hide(event) { if (event.currentTarget === tip.owner) $("tip").hidden = true; },
};
