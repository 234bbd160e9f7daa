"""The parts of a page that tests look at."""

from html.parser import HTMLParser

VOID = {"meta", "br", "path", "use", "rect"}


class Outline(HTMLParser):
    """Headings, table cells and attributes, with a check that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def outline(document: str) -> Outline:
    parser = Outline()
    parser.feed(document)
    parser.close()
    assert parser.open == []
    return parser
