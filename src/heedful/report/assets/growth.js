// How a measure grows with the number of tokens: all heads, their mean, the chosen head, and a random head.
function drawGrowth() {
  if (SCAN.lengths.length < 2) return;
  $("growth-section").hidden = false;
  const m = measureOf(state.measure) ?? measureOf(RANK), holder = $("figure-growth"), i = state.head;
  $("growth-about").textContent = t("growth.about", { measure: measureName(m.id) });
  const N = SCAN.lengths, at = (values, k) => SCAN.blocks[k][values];
  const positive = (points) => points.filter(([, v]) => v !== null && v !== undefined && v > 0);
  const series = (k) => positive(N.map((n, l) => [n, at(m.id, l)?.[k]]));
  const spread = N.map((n, l) => [n, known(at(m.id, l) ?? []).filter((v) => v > 0).sort((a, b) => a - b)]).filter(([, v]) => v.length);
  if (spread.length < 2) { holder.replaceChildren(h("p", { class: "caption" }, "–")); $("growth-table").replaceChildren(); return; }
  const overHeads = (id) => positive(N.map((n, l) => [n, SCAN.means[id]?.[l]]));
  const middle = overHeads(m.id), low = spread.map(([n, v]) => [n, quantile(v, 0.25)]), high = spread.map(([n, v]) => [n, quantile(v, 0.75)]);
  const base = m.base ? overHeads(m.base) : [];
  const chosen = series(i);

  const width = Math.min(Math.max(holder.clientWidth, 260), 820), left = 44, right = 10, bottom = 36;
  const law = (power) => (Number.isFinite(power) ? " " + t("growth.law", { slope: number(power) }) : "");
  const entries = [{ cls: "line-this", text: headName(i) + law(chosen.length > 1 ? slope(chosen) : NaN) }, { cls: "line-median", text: t("growth.mean") + law(exponentOf(m.id)) }];
  if (base.length) entries.push({ cls: "line-random", text: t("random") + law(exponentOf(m.base)) });
  const key = lineKey(entries, left, width), top = key.height + 8, height = Math.round(Math.min(400, Math.max(260, width * 0.5))) + key.height;
  const values = [...spread.flatMap(([, v]) => [v[0], v.at(-1)]), ...base.map(([, v]) => v)];
  const y = [Math.min(...values) / 1.15, Math.max(...values) * 1.15], edge = (N.at(-1) / N[0]) ** 0.04;
  const axes = logAxes({ width, height, left, right, bottom, top, x: [N[0] / edge, N.at(-1) * edge], y });
  const nodes = [
    ...axes.ticks(y).flatMap((v) => [s("path", { class: "axis", d: `M${left} ${axes.Y(v)}H${width - right}` }), s("text", { x: left - 7, y: axes.Y(v) + 4, "text-anchor": "end" }, plain(v))]),
    ...N.flatMap((n) => [s("path", { class: "axis", d: `M${axes.X(n)} ${height - bottom}v4` }), s("text", { x: axes.X(n), y: height - bottom + 16, "text-anchor": "middle" }, String(n))]),
    s("path", { class: "frame", d: `M${left} ${height - bottom}H${width - right}` }),
    s("text", { x: width - right, y: height - 4, "text-anchor": "end" }, t("growth.x")),
    s("path", { class: "band", d: axes.line(low) + axes.line([...high].reverse()).replace("M", "L") + "Z" }),
    ...SCAN.heads.map((_, k) => (matches(k) ? s("path", { class: "line-head", d: axes.line(series(k)) }) : null)),
    base.length ? s("path", { class: "line-random", d: axes.line(base) }) : null,
    s("path", { class: "line-median", d: axes.line(middle) }),
    ...middle.map(([n, v]) => s("circle", { class: "dot-median", cx: axes.X(n), cy: axes.Y(v), r: 3 })),
    s("path", { class: "line-this", d: axes.line(chosen) }),
    ...N.map((n, l) => {
      const [a, b] = [at(m.id + "_low", l)?.[i], at(m.id + "_high", l)?.[i]];
      return a > 0 && b > a ? s("path", { class: "whisker", d: `M${axes.X(n)} ${axes.Y(a)}V${axes.Y(b)}` }) : null;
    }),
    ...chosen.map(([n, v]) => s("circle", { class: "dot-this", cx: axes.X(n), cy: axes.Y(v), r: 4 })),
    ...key.nodes,
  ].filter(Boolean);
  const svg = s("svg", { role: "img", "aria-label": `${t("growth.label")}: ${measureName(m.id)}. ${entries.map((e) => e.text).join("; ")}`, viewBox: `0 0 ${width} ${height}`, width, height }, ...nodes);
  figure(holder, `growth-${m.id}`, measureName(m.id), `${SCAN.title} · ${t("growth.title")} · ${measureName(m.id)}`, svg);
  growthTable(m);
}

// The exponent of the answer, that of the mean over heads.
const exponentOf = (id) => SCAN.exponents[id] ?? NaN;

// Means by kind of head: shows which kinds grow.
function growthTable(m) {
  const kinds = block().kind_of_head, all = SCAN.heads.map((_, k) => k);
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);
  const line = (name, values, power) => h("tr", {}, h("th", { scope: "row" }, name), ...values.map((v) => h("td", {}, number(v, m.format))), h("td", {}, number(power)));
  const ofKind = (kind) => {
    const heads = all.filter((k) => kinds[k] === kind);
    const values = SCAN.lengths.map((_, l) => mean(known(heads.map((k) => SCAN.blocks[l][m.id]?.[k]))));
    const usable = SCAN.lengths.map((n, l) => [n, values[l]]).filter(([, v]) => v > 0);
    return line(badge(kind), values, usable.length > 1 ? slope(usable) : NaN);
  };
  const rows = KINDS.filter((kind) => kinds.includes(kind)).map(ofKind);
  $("growth-table").replaceChildren(
    h("table", { class: "numbers" }, h("thead", {}, h("tr", {}, h("th", {}, t("growth.x")), ...SCAN.lengths.map((n) => h("th", { scope: "col" }, String(n))), h("th", { scope: "col" }, term(t("growth.exponent"), t("growth.exponent.about"))))),
      h("tbody", {}, ...rows, line(t("growth.all"), SCAN.means[m.id] ?? [], exponentOf(m.id)))),
    h("p", { class: "caption" }, t("growth.means", { n: SCAN.lengths[state.at] })));
}

// Least-squares fit in log-log.
function slope(points) {
  const x = points.map(([n]) => Math.log(n)), y = points.map(([, v]) => Math.log(v));
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length, [mx, my] = [mean(x), mean(y)];
  return x.reduce((sum, v, k) => sum + (v - mx) * (y[k] - my), 0) / x.reduce((sum, v) => sum + (v - mx) ** 2, 0);
}
