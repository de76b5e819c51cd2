"""A page as an HTML parser sees it, and the elements that our templates use."""

from __future__ import annotations

from html.parser import HTMLParser

OURS = {"html", "head", "meta", "title", "style", "body", "nav", "ul", "li", "a", "h1", "h2", "h3", "h4", "p", "code"}
OURS |= {"img", "div", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
OURS |= {"figure", "b", "dl", "dt", "dd", "script"}


class Elements(HTMLParser):
    """Start tags with their attributes, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements(html):
    parser = Elements()
    parser.feed(html)
    parser.close()
    return parser.found


class Words(HTMLParser):
    """The text that a page shows."""

    def __init__(self):
        super().__init__()
        self.found, self.hidden = [], 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("style", "script", "title")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("style", "script", "title")

    def handle_data(self, data):
        if not self.hidden:
            self.found.append(data)


def text(html):
    parser = Words()
    parser.feed(html)
    parser.close()
    return " ".join(" ".join(parser.found).split())
