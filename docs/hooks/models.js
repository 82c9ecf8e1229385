// A box above docs/results/models.md that filters the rows of the linked models.csv, without other scripts or hosts.
const cells = (line) => [...line.matchAll(/("((?:[^"]|"")*)"|[^,]*)(?:,|$)/g)]
  .map((cell) => (cell[2] === undefined ? cell[1] : cell[2].replaceAll('""', '"')));
const place = document.getElementById("filter-models");
const link = document.querySelector('a[href$="models.csv"]');
const LIMIT = 50;
const row = (values, kind) => {
  const line = document.createElement("tr");
  for (const value of values) line.appendChild(document.createElement(kind)).textContent = value;
  return line;
};
fetch(link.href).then((answer) => answer.text()).then((text) => {
  const [head, ...rows] = text.trim().split("\n").map((line) => cells(line).slice(0, 9));
  const box = Object.assign(document.createElement("input"), {type: "search"});
  box.placeholder = "part of a model's name, or a verdict such as refused";
  box.style = "width: 100%; padding: .5em; border: 1px solid; border-radius: .2em";
  box.setAttribute("aria-label", "Filter the models");
  const table = document.createElement("table");
  box.oninput = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((values) => words.every((word) => values.join(" ").toLowerCase().includes(word)));
    table.replaceChildren(...(words.length ? [row(head, "th"), ...found.slice(0, LIMIT).map((one) => row(one, "td"))] : []));
    if (words.length && found.length > LIMIT) table.append(row([`and ${found.length - LIMIT} more`], "td"));
  };
  place.append(box, table);
}).catch(() => {}); // a page opened as a file cannot read it; the link remains
