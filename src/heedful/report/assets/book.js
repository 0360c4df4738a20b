// The theory book: filters, deep links, copying, keys. Without this script the page is complete, only longer.
(() => {
  const $ = (id) => document.getElementById(id);
  const claims = [...document.querySelectorAll("article.claim")].map((element) => ({
    element,
    text: (element.textContent + " " + element.id).toLowerCase(),
    verdict: element.dataset.verdict,
    kind: element.dataset.kind,
    differs: "differs" in element.dataset,
  }));
  const links = new Map([...document.querySelectorAll("[data-for]")].map((a) => [a.dataset.for, a]));
  const chips = [...document.querySelectorAll("[data-verdict-chip]")];
  const pressed = (button) => button.getAttribute("aria-pressed") === "true";
  const press = (button, on) => button.setAttribute("aria-pressed", String(on));
  const words = {
    en: { copied: "Copied", copy: "Copy", shown: (n, all) => (n === all ? `${n} claims` : `${n} of ${all} claims`) },
    zh: { copied: "已复制", copy: "复制", shown: (n, all) => (n === all ? `${n} 条命题` : `${all} 条中的 ${n} 条`) },
  };

  function filter() {
    const wanted = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = chips.filter(pressed).map((chip) => chip.dataset.verdictChip);
    const kind = $("kind").value, differing = pressed($("only-differing"));
    let shown = 0;
    for (const claim of claims) {
      const fits = wanted.every((word) => claim.text.includes(word))
        && (!verdicts.length || verdicts.includes(claim.verdict))
        && (!kind || claim.kind === kind)
        && (!differing || claim.differs);
      claim.element.hidden = !fits;
      const link = links.get(claim.element.id);
      if (link) link.parentElement.hidden = !fits;
      shown += fits;
    }
    for (const section of document.querySelectorAll("section.chapter"))
      section.hidden = !section.querySelector("article.claim:not([hidden])");
    $("nothing").hidden = shown > 0;
    $("reset").hidden = shown === claims.length;
    $("shown").textContent = words[heedful.language()].shown(shown, claims.length);
  }
  function reset() {
    $("search").value = "";
    $("kind").value = "";
    [...chips, $("only-differing")].forEach((chip) => press(chip, false));
    filter();
  }
  // A link to a claim shows it even if the filters hide it.
  function follow() {
    let id = location.hash.slice(1);
    try { id = decodeURIComponent(id); } catch { /* as it is */ }
    const target = id && $(id);
    if (!target) return;
    if (target.closest("[hidden]")) { reset(); target.scrollIntoView(); }
    const article = target.closest("article.claim");
    document.querySelectorAll(".current").forEach((e) => e.classList.remove("current"));
    if (article) article.classList.add("current");
  }
  function speak() {
    const code = heedful.language(), select = $("kind"), names = select.dataset[code + "Kinds"].split("|");
    [...select.options].forEach((option, i) => { option.textContent = i ? names[i - 1] : select.dataset[code + "Any"]; });
  }
  async function copy(button) {
    const text = button.closest(".code").querySelector("code").textContent;
    try { await navigator.clipboard.writeText(text); } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const tell = (key) => button.querySelectorAll("[lang]").forEach((e) => { e.textContent = words[e.lang][key]; });
    tell("copied");
    setTimeout(() => tell("copy"), 1600);
  }
  function step(by) {
    const open = claims.filter((claim) => !claim.element.hidden).map((claim) => claim.element);
    const edge = 90, at = open.findIndex((e) => e.getBoundingClientRect().top > edge);
    const current = (at < 0 ? open.length : at) - 1;
    const next = open[Math.min(Math.max(by > 0 ? current + 1 : current - (Math.abs((open[current]
      ?? document.body).getBoundingClientRect().top - 64) < 30 ? 1 : 0), 0), open.length - 1)];
    if (next) { next.scrollIntoView(); next.querySelector("h3 a").focus({ preventScroll: true }); }
  }

  $("search").addEventListener("input", filter);
  $("kind").addEventListener("change", filter);
  for (const chip of [...chips, $("only-differing")])
    chip.addEventListener("click", () => { press(chip, !pressed(chip)); filter(); });
  $("reset").addEventListener("click", () => { reset(); $("search").focus(); });
  document.querySelectorAll("button.copy").forEach((b) => b.addEventListener("click", () => copy(b)));
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
    if (event.key === "Escape") { reset(); document.activeElement?.blur(); }
    else if (typing) return;
    else if (event.key === "/") { event.preventDefault(); $("search").focus(); }
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "l") document.querySelector("[data-language][aria-pressed=false]").click();
  });
  // The contents are open beside the text on wide screens, and folded above it on narrow ones.
  const roomy = matchMedia("(min-width: 64rem)");
  const unfold = () => { $("contents").open = roomy.matches; };
  roomy.addEventListener("change", unfold);
  unfold();
  if ("IntersectionObserver" in window) {
    const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
      const link = links.get(entry.target.id);
      if (!link) return;
      if (entry.isIntersecting) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }), { rootMargin: "-15% 0px -70% 0px" });
    claims.forEach((claim) => seen.observe(claim.element));
  }
  // Chromium always reserves the width of the widest root sign of the font, which leaves a gap; remove it.
  const closeGaps = () => document.querySelectorAll("msqrt").forEach((root) => {
    const last = root.lastElementChild?.getBoundingClientRect(), whole = root.getBoundingClientRect();
    if (last && whole.right - last.right > 2) root.style.marginRight = `${last.right - whole.right + 1}px`;
  });
  document.fonts.ready.then(closeGaps);
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open]):not(#contents)")];
    folded.forEach((e) => { e.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((e) => { e.open = false; }));
  // Texts in the other language have other heights; keep the reader's position.
  let held = null;
  document.querySelectorAll("[data-language]").forEach((b) => b.addEventListener("click", () => {
    const element = claims.map((claim) => claim.element).find((e) => !e.hidden && e.getBoundingClientRect().bottom > 70);
    held = element && element.getBoundingClientRect().top < innerHeight
      ? { element, top: element.getBoundingClientRect().top } : null;
  }, true));
  heedful.onChange(() => {
    speak();
    filter();
    if (held) scrollBy(0, held.element.getBoundingClientRect().top - held.top);
    held = null;
  });
  speak();
  filter();
  follow();
})();
