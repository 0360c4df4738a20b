// Heads by layer and number. Measures and differences use the same grid; the selection follows the focus.
const grids = [];
const MIXED = new Set(SCAN.layers.map((layer) => layer.kind)).size > 1;

function grid(holder, { name, heading, title, label, fill, mark, words, tip: tell, legend }) {
  const columns = Math.max(...SCAN.heads.map(([, head]) => head)) + 1;
  const wide = Math.max(holder.clientWidth, 260), left = Math.ceil(Math.max(MIXED ? 66 : 30, textWidth(t("layer")) + 9));
  const width = Math.min(96, (wide - left - 2) / columns);
  const height = Math.max(14, Math.min(width, 34, 620 / LAYERS.length));
  const key = legend(Math.min(wide, left + columns * width), left);
  if (SCAN.heads.some((_, i) => !fill(i))) {
    key.nodes.push(hatch(left, key.height, 15, 13), s("text", { x: left + 21, y: key.height + 11 }, t("not.measured")));
    key.height += 20;
  }
  const top = key.height + 34;
  const size = { width: Math.ceil(Math.max(left + columns * width + 2, Math.min(wide, key.width ?? 0))), height: Math.ceil(top + LAYERS.length * height + 2) };
  const gap = width > 14 ? 1 : 0.5;
  const row = new Map(LAYERS.map((layer, i) => [layer, i]));
  const place = (i) => ({ x: left + SCAN.heads[i][1] * width, y: top + row.get(SCAN.heads[i][0]) * height });

  const rows = LAYERS.map((layer, i) => s("g", { role: "row", "aria-rowindex": i + 1 }));
  const cells = SCAN.heads.map(([layer, head], i) => {
    const { x, y } = place(i), colour = fill(i), inside = colour ? inkOn(colour) : null;
    const cell = s("g", {
      class: matches(i) ? "cell" : "cell dim", role: "gridcell", tabindex: i === state.head ? 0 : -1, "data-i": i,
      "aria-label": `${headName(i)}: ${words(i)}`, "aria-selected": String(i === state.head), "aria-colindex": head + 1,
    }, s("rect", { x: x + gap / 2, y: y + gap / 2, width: width - gap, height: height - gap, rx: width > 14 ? 1.5 : 0, fill: colour ? css(colour) : "none" }), colour ? null : hatch(x + gap / 2, y + gap / 2, width - gap, height - gap));
    if (colour) cell.append(...mark(i, { x, y, width, height, ink: inside }));
    rows[row.get(layer)].append(cell);
    return cell;
  });
  const every = (step) => (_, i) => i % step === 0;
  const ticks = [
    s("text", { x: left, y: top - 20 }, t("head")),
    ...[...Array(columns).keys()].filter(every(Math.ceil(19 / width))).map((head) => s("text", { x: left + (head + 0.5) * width, y: top - 5, "text-anchor": "middle" }, String(head))),
    s("text", { x: left - 7, y: top - 5, "text-anchor": "end" }, t("layer")),
    ...LAYERS.filter(every(Math.ceil(13 / height))).map((layer) => s("text", { x: left - 7, y: top + (row.get(layer) + 0.5) * height + 4, "text-anchor": "end" }, String(layer) + (MIXED ? " " + (SCAN.layers.find((l) => l.layer === layer)?.kind ?? "") : ""))),
  ];
  const halo = s("rect", { class: "halo", rx: 2 }), ring = s("rect", { class: "ring", rx: 2 });
  const svg = s("svg", { role: "grid", "aria-label": label, "aria-rowcount": LAYERS.length, "aria-colcount": columns, viewBox: `0 0 ${size.width} ${size.height}`, width: size.width, height: size.height },
    s("g", { "aria-hidden": "true" }, ...key.nodes, ...ticks), ...rows, halo, ring);

  const self = {
    svg,
    select(i, focus) {
      cells.forEach((cell, at) => { if (cell.getAttribute("tabindex") === "0" || at === i) { cell.setAttribute("tabindex", at === i ? 0 : -1); cell.setAttribute("aria-selected", String(at === i)); } });
      const { x, y } = place(i);
      for (const box of [halo, ring]) for (const [k, v] of Object.entries({ x: x - 0.5, y: y - 0.5, width: width + 1, height: height + 1 })) box.setAttribute(k, v);
      if (focus) cells[i].focus({ preventScroll: false });
    },
  };
  svg.addEventListener("click", (event) => { const i = indexOf(event); if (i !== null) select(i, self); });
  svg.addEventListener("focusin", (event) => { const i = indexOf(event); if (i !== null && i !== state.head) select(i, self); });
  svg.addEventListener("keydown", (event) => { const i = step(event); if (i !== null) { event.preventDefault(); select(i, self); } });
  svg.addEventListener("pointermove", (event) => { const i = indexOf(event); if (i === null || event.pointerType === "touch") tip.hide(event); else tip.show(event, `${headName(i)}\n${tell(i)}`); });
  svg.addEventListener("pointerleave", tip.hide);

  const had = holder.contains(document.activeElement) && document.activeElement.closest("[role=grid]");
  figure(holder, name, heading, title, svg);
  const before = grids.findIndex((each) => each.holder === holder);
  if (before >= 0) grids.splice(before, 1);
  grids.push(Object.assign(self, { holder }));
  self.select(state.head, had);
}

// A cell without a number: an outline with hatching.
function hatch(x, y, width, height) {
  const lines = [];
  for (let at = 5; at < width + height; at += 5) {
    const [x0, y0, x1, y1] = [Math.max(0, at - height), Math.min(at, height), Math.min(at, width), Math.max(0, at - width)];
    lines.push(`M${x + x0} ${y + y0}L${x + x1} ${y + y1}`);
  }
  return s("path", { class: "hatch", d: `M${x} ${y}h${width}v${height}h${-width}Z${lines.join("")}` });
}

function indexOf(event) {
  const cell = event.target.closest?.("[data-i]");
  return cell ? Number(cell.getAttribute("data-i")) : null;
}

// The target of an arrow key: the next existing head in the same row or column.
function step(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const [layer, head] = SCAN.heads[state.head], here = LAYERS.indexOf(layer);
  const inRow = SCAN.heads.map(([l, k], i) => ({ l, k, i })).filter(({ l }) => l === layer);
  const nearest = (at) => {
    if (at < 0 || at >= LAYERS.length) return null;
    const there = SCAN.heads.map(([l, k], i) => ({ l, k, i })).filter(({ l }) => l === LAYERS[at]);
    return there.reduce((best, each) => (Math.abs(each.k - head) < Math.abs(best.k - head) ? each : best)).i;
  };
  switch (event.key) {
    case "ArrowLeft": return inRow.filter(({ k }) => k < head).at(-1)?.i ?? state.head;
    case "ArrowRight": return inRow.find(({ k }) => k > head)?.i ?? state.head;
    case "ArrowUp": return nearest(here - 1) ?? state.head;
    case "ArrowDown": return nearest(here + 1) ?? state.head;
    case "Home": return inRow[0].i;
    case "End": return inRow.at(-1).i;
    case "PageUp": return nearest(0);
    case "PageDown": return nearest(LAYERS.length - 1);
    default: return null;
  }
}

// legends
function rampLegend(stops, ticks) {
  return (wide, left) => {
    const width = Math.min(280, wide - left - 50), steps = 56;
    const nodes = [...Array(steps).keys()].map((i) => s("rect", { x: left + (i * width) / steps, y: 2, width: width / steps + 0.6, height: 9, fill: css(ramp(stops, (i + 0.5) / steps)) }));
    ticks.forEach(({ at, text }, i) => nodes.push(s("text", { x: left + at * width, y: 25, "text-anchor": i === 0 && at === 0 ? "start" : at === 1 ? "end" : "middle" }, text)));
    return { nodes, height: 34 };
  };
}
function kindLegend(counts) {
  return (wide, left) => {
    const nodes = [];
    let x = left, y = 12;
    for (const kind of KINDS) {
      const text = `${kindName(kind)} ${counts[kind] ?? 0}`, width = 22 + textWidth(text) + 18, colour = kindColour(kind);
      if (x + width > wide + 18 && x > left) { x = left; y += 22; }
      nodes.push(s("rect", { x, y: y - 11, width: 15, height: 15, rx: 1.5, fill: css(colour) }), kindMark(kind, x, y - 11, 15, inkOn(colour)), s("text", { x: x + 21, y: y + 1 }, text));
      x += width;
    }
    return { nodes, height: y + 8, width: Math.max(...nodes.map((node) => Number(node.getAttribute("x") ?? 0) + textWidth(node.textContent))) };
  };
}
const kindMark = (kind, x, y, size, ink) =>
  s("path", { d: heedful.data.glyphs[kind], transform: `translate(${x} ${y}) scale(${size / 16})`, fill: kind === "low rank" ? ink : "none", stroke: ink, "stroke-width": kind === "low rank" ? 1 : 2.2, "stroke-linecap": "round", "pointer-events": "none" });

function drawMap() {
  const b = block(), holder = $("figure-map"), tokens = t("tokens", { n: SCAN.lengths[state.at] });
  const title = `${SCAN.title} · ${measureName(state.measure)} · ${tokens}`;
  if (state.measure === "kind") {
    const counts = {};
    b.kind_of_head.forEach((kind) => { counts[kind] = (counts[kind] ?? 0) + 1; });
    const words = (i) => (b.kind_of_head[i] ? `${kindName(b.kind_of_head[i])} · ${patternName(i)}` : "–");
    grid(holder, {
      name: "kinds", heading: `${t("kind")} · ${tokens}`, title, label: `${t("kind")}. ${t("map.label")}`, words, tip: words, legend: kindLegend(counts),
      fill: (i) => (b.kind_of_head[i] ? kindColour(b.kind_of_head[i]) : null),
      mark: (i, { x, y, width, height, ink }) => {
        const size = Math.min(width, height) * 0.8;
        return [kindMark(b.kind_of_head[i], x + (width - size) / 2, y + (height - size) / 2, size, ink)];
      },
    });
    return;
  }
  const m = measureOf(state.measure), values = b[m.id] ?? [], scale = scaleOf(values, m);
  const stops = scaleStops(), colour = (x) => ramp(stops, scale.share(x));
  const words = (i) => {
    const range = intervalText(b[m.id + "_low"]?.[i], b[m.id + "_high"]?.[i], m.format);
    const base = m.base && b[m.base] ? ` · ${t("random.short")} ${number(b[m.base][i], m.format)}` : "";
    const sure = certified(m.id, i) ? ` · ${t("certified.short", { range: certified(m.id, i) })}` : "";
    return `${measureName(m.id)} ${number(values[i], m.format)}${range ? ` (${range})` : ""}${sure}${base}`;
  };
  grid(holder, {
    name: m.id, heading: `${measureName(m.id)} · ${tokens}`, title, label: `${measureName(m.id)}. ${t("map.label")}`, words, tip: words,
    legend: rampLegend(stops, [0, 0.5, 1].map((at) => ({ at, text: number(scale.at(at), m.format) }))),
    fill: (i) => (values[i] === null || values[i] === undefined ? null : colour(values[i])),
    mark: (i, { x, y, width, height, ink }) => (width >= 40 && height >= 20 ? [s("text", { x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle", class: ink === "#ffffff" ? "on-dark" : "on-light", "pointer-events": "none" }, number(values[i], m.format))] : []),
  });
}
