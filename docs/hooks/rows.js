// A box that hides the rows of the page's tables which do not have all of its words.
const box = Object.assign(document.createElement("input"), {type: "search", placeholder: "part of a row, such as a name"});
box.style = "width: 100%; padding: .5em; border: 1px solid; border-radius: .2em";
box.setAttribute("aria-label", "Filter the rows");
box.oninput = () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("article tbody tr"))
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
};
document.getElementById("filter-rows").append(box);
