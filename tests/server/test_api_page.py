"""The page at /docs has all that the OpenAPI document has, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from fastapi import FastAPI

from onestem.request import ResponseFormat
from onestem.server.api.openapi import document
from onestem.server.api.routes import api, open_routes, tokens
from onestem.server.page.reference import api_page
from tests.server.harness import running


class Page(HTMLParser):
    """What a page refers to, and the rows of the tables that follow each element with an id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.places: list[str] = []  # values of attributes that name other files
        self.rows: dict[str, dict[str, str]] = {}
        self.texts: list[str] = []
        self.style = ""
        self._inside: list[str] = []
        self._row: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self._end_row()
        self.tags.add(tag)
        self._inside.append(tag)
        told = dict(attributes)
        self.places += [told[name] for name in ("href", "src", "action", "data") if name in told]
        if "id" in told:
            self.rows[told["id"]] = {}
        if told.get("class") == "name":
            self._row = [""]

    def handle_endtag(self, tag):
        if tag == "tr" and self._row:
            name, *rest = "".join(self._row).split()
            self.rows[next(reversed(self.rows))][name] = " ".join(rest)
            self._row = []

    def _end_row(self):
        if self._row:
            self._row.append(" ")

    def handle_data(self, data):
        if self._inside[-1:] == ["style"] and not self.style:
            self.style = data
            return
        self.texts.append(data)
        if self._row:
            self._row.append(data)


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


@pytest.fixture(scope="module")
def told():
    app = FastAPI()
    for router in (api, tokens, open_routes):
        app.include_router(router)
    return document(app, keys=True)


@pytest.fixture(scope="module")
def page(told):
    return Page(api_page(told)[0])


def test_each_route_is_there(told, page):
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path} {plain(operation['description'])}" in page.text
            assert f"#{operation['operationId']}" in page.places
            parameters = page.rows[operation["operationId"]]
            assert list(parameters) == [one["name"] for one in operation.get("parameters", ())]
            for one in operation.get("parameters", ()):
                default = one["schema"].get("default")
                assert default is None or json.dumps(default) in parameters[one["name"]]
    assert page.text.count("4XX What is wrong with the request.") == 28
    assert "Authorization: Bearer KEY" in page.text
    assert "limit an integer from 1 to 10000 20 in the query" in page.text


def test_each_field_is_there(told, page):
    for name, schema in told["components"]["schemas"].items():
        rows = page.rows[name]
        assert list(rows) == list(schema["properties"])
        for field, one in schema["properties"].items():
            assert plain(one.get("description", "")) in rows[field]
            assert rows[field].startswith("required ") == (field in schema.get("required", ()))
            if one.get("default") is not None:
                assert json.dumps(one["default"]) in rows[field]
            numbers = [
                option[key]
                for option in (one, *one.get("anyOf", ()))
                for key in ("minimum", "maximum", "maxLength", "maxItems", "pattern")
                if key in option and "x-expected" not in one and option.get(key) != 0
            ]
            for number in numbers:
                shown = f"{number:g}".replace("e-0", "e-") if type(number) is float else str(number)
                assert shown in rows[field]
            for reference in re.findall(r"#/components/schemas/(\w+)", json.dumps(one)):
                assert f"#{reference}" in page.places


def test_what_a_field_is_like(page):
    chat, completion = page.rows["ChatBody"], page.rows["CompletionBody"]
    assert chat["n"].startswith("an integer from 1 to 4096 1 Sequences to sample")
    assert chat["top_p"].startswith("a number above 0 and at most 1 Keep the smallest set")
    assert chat["messages"] == "list of Message, 1 to 4096"
    assert chat["skip_special_tokens"].startswith("true or false true Leave special tokens out")
    assert chat["length_penalty"] == "only 1.0"
    assert chat["max_tokens"].startswith("an integer of at least 1 Maximum")
    assert completion["max_tokens"].startswith("an integer of at least 1 16 Maximum")
    assert page.rows["Message"]["role"].startswith("required system, developer, user, assistant")
    assert page.rows["UploadBody"].keys() == {"file", "purpose"}
    assert chat["response_format"].startswith("ResponseFormat ")
    assert page.rows["ResponseFormat"].keys() == ResponseFormat.model_fields.keys()
    assert page.rows["StructuredOutputs"]["json"] == "an object or text or true or false"


def test_nothing_is_loaded(told, page):
    html, headers = api_page(told)
    assert not page.tags & {"script", "iframe", "img", "object", "embed", "base", "form", "video"}
    for place in page.places:
        assert re.match(r"#|/(?!/)|data:image/svg", place), place
    assert not re.search(r"@import|url\(", page.style)
    assert " style=" not in html
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    targets = {place[1:] for place in page.places if place.startswith("#")}
    assert targets <= page.rows.keys()


def test_the_server_has_it(tmp_path, tiny_model):
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        answer = http.get("/docs")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        html, headers = api_page(http.get("/openapi.json").json())
        assert answer.text == html
        assert headers.items() <= {k.title(): v for k, v in answer.headers.items()}.items()
        assert "/docs" not in http.get("/openapi.json").json()["paths"]
