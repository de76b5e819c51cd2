import pytest


@pytest.fixture(autouse=True)
def svg_alone(request, monkeypatch):
    """Reports draw SVG alone, which the page shows: PNG and PDF take longer, and tests marked `vector` see them."""
    if not request.node.get_closest_marker("vector"):
        monkeypatch.setattr("anchorlora_lab.report.page.FILES", ())
