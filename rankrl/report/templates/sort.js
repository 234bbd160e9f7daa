for (const table of document.querySelectorAll("table.sortable")) {
  const titles = [...table.tHead.rows[0].cells];
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const text = title.classList.contains("text");
      const before = title.getAttribute("aria-sort");
      const direction = before === "ascending" ? "descending"
        : before === "descending" || text ? "ascending" : "descending";
      titles.forEach((other) => other.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value ?? "";
      const order = (first, second) => {
        const [a, b] = [value(first), value(second)];
        if (a === "" || b === "") return (a === "") - (b === "");
        return sign * (text ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(order));
    });
  });
}
