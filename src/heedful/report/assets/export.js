// Save figures as files. An SVG file includes its colours; a PNG is that SVG at twice its size.
const WRITTEN = [
  "fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-family", "font-size",
  "font-weight", "text-anchor", "dominant-baseline", "image-rendering",
];

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function standalone(svg, title) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of WRITTEN) to[i].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "tabindex", "role", "aria-label", "aria-selected", "aria-rowindex", "aria-colindex", "data-i"]) to[i].removeAttribute(name);
  });
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const page = getComputedStyle(document.body), edge = 16, head = 34;
  const box = [-edge, -head - edge, width + 2 * edge, height + head + 2 * edge];
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", box.join(" "));
  copy.setAttribute("width", box[2]);
  copy.setAttribute("height", box[3]);
  copy.prepend(
    s("title", {}, title),
    s("rect", { x: box[0], y: box[1], width: box[2], height: box[3], fill: page.backgroundColor }),
    s("text", { x: 0, y: -head + 10, fill: page.color, "font-size": 15, "font-weight": 600, "font-family": page.fontFamily }, title),
  );
  return { text: new XMLSerializer().serializeToString(copy), width: box[2], height: box[3] };
}

function savePNG(name, { text, width, height }) {
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = h("canvas", { width: Math.round(2 * width), height: Math.round(2 * height) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(name, blob), "image/png");
  });
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}

// A figure: heading, two export buttons, drawing.
function figure(holder, name, heading, title, svg, ...rest) {
  const file = () => `${SCAN.title}-${name}`.replace(/[^\w.-]+/g, "-");
  const button = (label, key, act) => h("button", { type: "button", class: "tool", "aria-label": `${t(key)}: ${heading}`, title: t(key), onclick: act }, label);
  const exports = h("div", { class: "exports" },
    button("SVG", "export.svg", () => save(file() + ".svg", new Blob([standalone(svg, title).text], { type: "image/svg+xml" }))),
    button("PNG", "export.png", () => savePNG(file() + ".png", standalone(svg, title))));
  holder.replaceChildren(h("div", { class: "figure-head" }, h("h4", {}, heading), exports), svg, ...rest);
}

const csvCell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const csvText = (rows) => "\ufeff" + rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
