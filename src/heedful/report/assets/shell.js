"use strict";
// Common to all pages: data, switches for language and colours, and callbacks after a switch.
const heedful = (() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const listeners = [];

  // A browser may refuse storage for a page opened from disk; then a choice is lost when the page is closed.
  const remember = (key, value) => { try { localStorage.setItem("heedful." + key, value); } catch { /* not kept */ } };
  const recall = (key) => { try { return localStorage.getItem("heedful." + key); } catch { return null; } };
  const each = (selector, f) => document.querySelectorAll(selector).forEach(f);
  const changed = () => listeners.forEach((f) => f());

  function setLanguage(code) {
    root.lang = code;
    document.title = root.getAttribute("data-title-" + code) ?? document.title;
    each("[data-language]", (b) => b.setAttribute("aria-pressed", String(b.dataset.language === code)));
    for (const name of ["aria-label", "placeholder", "title"])
      each(`[data-${code}-${name}]`, (e) => e.setAttribute(name, e.getAttribute(`data-${code}-${name}`)));
  }
  function setTheme(choice) {
    if (choice === "auto") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", choice);
    each("[data-theme-choice]", (b) => b.setAttribute("aria-pressed", String(b.dataset.themeChoice === choice)));
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

  const languages = [...document.querySelectorAll("[data-language]")].map((b) => b.dataset.language);
  each("[data-language]", (b) => b.addEventListener("click", () => {
    setLanguage(b.dataset.language); remember("language", b.dataset.language); changed();
  }));
  each("[data-theme-choice]", (b) => b.addEventListener("click", () => {
    setTheme(b.dataset.themeChoice); remember("theme", b.dataset.themeChoice); changed();
  }));
  system.addEventListener("change", changed);
  setLanguage(languages.includes(recall("language")) ? recall("language") : root.lang);
  setTheme(["light", "dark"].includes(recall("theme")) ? recall("theme") : "auto");

  return { data, isDark, language: () => root.lang, onChange: (f) => { listeners.push(f); } };
})();
