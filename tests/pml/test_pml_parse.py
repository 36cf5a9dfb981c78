"""Markup to nodes: what works, and where and how the rest is refused."""

from __future__ import annotations

import pytest

from onestem.pml import (
    Import,
    Module,
    Parameter,
    PmlError,
    Prompt,
    Schema,
    Text,
    parse,
    parse_prompt,
    parse_schema,
    read,
    read_prompt,
    read_schema,
)
from onestem.pml.parser import MAX_DEPTH, MAX_ENTITY_TEXT


def module_text(markup: str, **options) -> str:
    """The text of module m in a schema that has no other."""
    schema = parse_schema(
        f'<schema name="s"><module name="m">{markup}</module></schema>', **options
    )
    (module,) = schema.body
    assert isinstance(module, Module)
    return "".join(node.text if isinstance(node, Text) else "[]" for node in module.body)


# --- what works --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("a &lt; b &amp;&amp; c &gt; d", "a < b && c > d"),
        ("<![CDATA[if a < b && b > c: <br/> &amp;]]>", "if a < b && b > c: <br/> &amp;"),
        ("one<!-- not this -->two", "onetwo"),
        ("one<?target not this?>two", "onetwo"),
        ("&#8364; &#x20AC; &quot;x&apos;", "€ € \"x'"),
        ("&#10;x&#32;", "\nx "),
        ("x<![CDATA[&]]>&amp;<![CDATA[&#10;]]>y", "x&&&#10;y"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("日本語 😀", "日本語 😀"),
    ],
)
def test_comments_cdata_and_references(markup, text):
    assert module_text(markup) == text


def test_plain_entities_may_be_declared():
    markup = '<!DOCTYPE prompt [<!ENTITY who "Ada  L.">]><prompt schema="s">&who;! &who;</prompt>'
    assert parse_prompt(markup).body == (Text("Ada  L.! Ada  L."),)


def test_both_spellings_of_parameters():
    for one, two in (("parameter", "length"), ("param", "len"), ("param", "length")):
        markup = f'<{one} name="p" {two}=" 12 " default="a&#10;b"/>'
        schema = parse_schema(f'<schema name="s"><module name="m">{markup}</module></schema>')
        assert schema.body[0].body == (Parameter("p", 12, "a\nb"),)


def test_encodings():
    text = '<prompt schema="s">é€</prompt>'
    expected = Prompt("s", ["é€"])
    assert parse(text) == expected
    assert parse("\ufeff" + text) == expected
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert parse(text.encode(encoding)) == expected
    declared = '<?xml version="1.0" encoding="cp1252"?>' + text
    assert parse(declared.encode("cp1252")) == expected
    # What is text already needs no decoding, whatever it once was.
    assert parse(declared) == expected


def test_nesting_to_the_limit():
    depth = MAX_DEPTH - 1
    opened = "".join(f'<module name="m{i}">' for i in range(depth))
    schema = parse_schema(f'<schema name="s">{opened}{"</module>" * depth}</schema>')
    assert schema == parse_schema(f'<schema name="s">{opened}{"</module>" * depth}</schema>')
    prompt = parse_prompt(
        '<prompt schema="s">'
        + "".join(f"<m{i}>" for i in range(depth))
        + "".join(f"</m{i}>" for i in reversed(range(depth)))
        + "</prompt>"
    )
    assert isinstance(prompt.body[0], Import)


# --- what is refused, and where ----------------------------------------------------------------

BOMB = '<!DOCTYPE schema [\n <!ENTITY a "aaaa">\n <!ENTITY b "&a;&a;&a;&a;">\n]>'
FLAT_BOMB = f'<!DOCTYPE schema [<!ENTITY a "{"x" * 1025}">]>'


@pytest.mark.parametrize(
    ("markup", "line", "column", "message"),
    [
        # Malformed.
        ('<schema name="s">\n <user>text</system>', 2, 12, "</system> closes <user> of line 2"),
        ('<schema name="s">\n <user>text', 2, 12, "<user> of line 2 is not closed"),
        ('<schema name="s">\n  a & b</schema>', 2, 5, "& is written &amp;"),
        ('<schema name="s">\n  a < b</schema>', 2, 5, "< is written &lt;"),
        ('<schema name="s">日本 &nbsp;</schema>', 1, 21, "entity &nbsp; is unknown"),
        ('<schema name="s" name="t"/>', 1, 18, "an attribute is given twice"),
        ('<schema name="s"/>\n<prompt/>', 2, 1, "nothing else"),
        ("", 1, 1, 'expected one <schema name="...">'),
        ("just text", 1, 1, 'expected one <schema name="...">'),
        ('<schema name="s">\x01</schema>', 1, 18, "malformed markup"),
        ('<schema name="s">\ud800</schema>', 1, 18, "malformed markup"),
        # Tags and attributes.
        ("<module/>", 1, 1, "<module> is no PML"),
        ('<schema name="s"><a>\n</a></schema>', 1, 18, "<a> is no tag of a schema"),
        ('<schema name="s">\n<prompt/></schema>', 2, 1, "<prompt> stands inside another"),
        ('<prompt schema="s"> <module name="m"/></prompt>', 1, 21, "belongs in a schema"),
        ("<schema/>", 1, 1, '<schema> has no name: write name="..."'),
        ('<schema name="s"><module/></schema>', 1, 18, "<module> has no name"),
        ('<schema name="s" nam="t"/>', 1, 1, "no attribute 'nam', expected: name, separator"),
        ('<schema name="s"><user x="y"/></schema>', 1, 18, "no attribute 'x', expected: none"),
        ('<schema name="s" xml:space="keep"/>', 1, 1, "xml:space is 'keep'"),
        ('<schema name="s"><module name="m" cache="no"/></schema>', 1, 18, "cache is 'no'"),
        ('<schema name="s"><module name="m x"/></schema>', 1, 18, "module name is 'm x'"),
        ('<schema name="s"><module name="union"/></schema>', 1, 18, "is a tag of the language"),
        # Places.
        ('<schema name="s">\n<union>\n text<module name="m"/></union></schema>', 3, 2,
         "text 'text' stands in a union"),
        ('<schema name="s"><param name="p" len="1"/></schema>', 1, 18,
         "parameter p stands in a schema"),
        ('<schema name="s"><module name="m"><user/></module></schema>', 1, 35,
         "role user stands in module m"),
        ('<schema name="s"><union/></schema>', 1, 18, "union is empty"),
        ('<prompt schema="s"><user/></prompt>', 1, 20, "<user> of a prompt is empty"),
        # Parameters.
        ('<schema name="s"><module name="m">\n<param name="p"/></module></schema>', 2, 1,
         "parameter p has no length"),
        ('<schema name="s"><module name="m"><param name="p" len="1" length="1"/></module></schema>',
         1, 35, "parameter p has two lengths"),
        ('<schema name="s"><module name="m"><param name="p" len="-1"/></module></schema>', 1, 35,
         "length of parameter p is '-1'"),
        ('<schema name="s"><module name="m"><param name="p" len="0"/></module></schema>', 1, 35,
         "length of parameter p is 0"),
        ('<schema name="s"><module name="m"><param name="p" len="1">x</param></module></schema>',
         1, 35, "parameter p has content"),
        # Names that stand for two things.
        ('<schema name="s"><module name="m"/>\n <user><module name="m"/></user></schema>', 2, 8,
         "module m of the schema is defined twice, first on line 1"),
        ('<schema name="s"><module name="m">\n<param name="p" len="1"/>\n <param name="p" len="2"/>'
         "</module></schema>", 3, 2, "parameter p of module m is defined twice, first on line 2"),
        # Bombs, and what reads other files.
        (BOMB + '<schema name="s">&b;</schema>', 3, 2, "entity b stands for markup or other"),
        (FLAT_BOMB + f'<schema name="s">{"&a;" * 1024}</schema>', 1, 19,
         f"{1024 * 1025} characters, limit is {MAX_ENTITY_TEXT}"),
        (FLAT_BOMB + f'<schema name="{"&a;" * 1024}"/>', 1, 19, "limit is"),
        ('<!DOCTYPE schema [<!ENTITY x SYSTEM "/etc/passwd">]><schema name="s">&x;</schema>',
         1, 19, "entity x is not plain text"),
        ('<!DOCTYPE schema SYSTEM "http://localhost/x.dtd"><schema name="s"/>', 1, 1,
         "external file, which is never read"),
        ('<!DOCTYPE schema [<!ENTITY % x "y"> %x;]><schema name="s"/>', 1, 19,
         "entity x is not plain text"),
        ('<!DOCTYPE schema [<!ATTLIST module cache CDATA "false">]><schema name="s"/>', 1, 19,
         "<!ATTLIST> in a document type is not supported"),
        ('<!DOCTYPE schema [<!ENTITY m "<module name=\'m\'/>">]><schema name="s">&m;</schema>',
         1, 19, "entity m stands for markup"),
        # Files.
        ('<schema name="s"><module name="m" src="m.txt"/></schema>', 1, 18,
         "the schema is no file"),
        # Imports.
        ('<prompt schema="s"><m p="1" p="2"/></prompt>', 1, 29, "an attribute is given twice"),
        ("<prompt/>", 1, 1, "<prompt> has no schema"),
        ('<prompt schema="s" x="1"/>', 1, 1, "<prompt> has no attribute 'x'"),
    ],
)  # fmt: skip
def test_refused(markup, line, column, message):
    with pytest.raises(PmlError) as caught:
        parse(markup, file="f.xml")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"f.xml:{line}:{column}: ")
    assert caught.value.at == ("f.xml", line, column)
    assert "\n" not in str(caught.value)


def test_too_deep():
    opened = "".join(f'<module name="m{i}">' for i in range(MAX_DEPTH))
    with pytest.raises(PmlError, match=f"inside {MAX_DEPTH} elements"):
        parse(f'<schema name="s">{opened}{"</module>" * MAX_DEPTH}</schema>')


def test_too_long(monkeypatch):
    monkeypatch.setattr("onestem.pml.parser.MAX_BYTES", 100)
    parse('<schema name="s"/>')
    with pytest.raises(PmlError, match="has 118 bytes, limit is 100"):
        parse('<schema name="s"/>' + " " * 100)


def test_what_bytes_are_not_text():
    with pytest.raises(PmlError, match=r"^f:2:3: byte 0xe9 is not utf-8 text"):
        parse(b'<schema name="s">\n\xc3\xa9 \xe9</schema>', file="f")
    with pytest.raises(PmlError, match=r"^f:1:1: encoding 'klingon' cannot be read"):
        parse(b'<?xml version="1.0" encoding="klingon"?><schema name="s"/>', file="f")
    with pytest.raises(PmlError, match="encoding 'hex' cannot be read"):
        parse(b'<?xml version="1.0" encoding="hex"?><schema name="s"/>')


def test_schema_or_prompt():
    with pytest.raises(PmlError, match=r"^<text>:1:1: this is a <prompt>, expected a <schema>"):
        parse_schema('<prompt schema="s"/>')
    with pytest.raises(PmlError, match=r"^<text>:1:1: this is a <schema>, expected a <prompt>"):
        parse_prompt('<schema name="s"/>')


# --- files -------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path):
    """A schema's folder with a source, and a file beside it that is none of its business."""
    folder = tmp_path / "library"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "unit.py").write_bytes(b"\xef\xbb\xbfif a < b:\r\n    pass  \n\n")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


def schema_with(folder, src: str, content: str = ""):
    path = folder / "schema.xml"
    path.write_text(
        f'<schema name="s">\n  <module name="m" src="{src}">{content}</module>\n</schema>'
    )
    return path


def test_source_files_are_taken_as_they_stand(library):
    schema = read_schema(schema_with(library, "src/unit.py", "<!-- c -->\n  "))
    assert schema == Schema("s", [Module("m", ["if a < b:\n    pass  \n\n"])])
    assert schema.body[0].body[0].at == (str(library / "src/unit.py"), 1, 1)
    # Relative to the schema, not to the working directory; `..` may stay inside.
    assert read_schema(schema_with(library, "src/../src/unit.py")) == schema


@pytest.mark.parametrize("src", ["../secret.txt", "src/../../secret.txt", "{root}/secret.txt", ""])
def test_sources_stay_in_the_schemas_folder(library, src):
    path = schema_with(library, src.format(root=library.parent))
    with pytest.raises(PmlError, match=r"schema.xml:2:3: src .* is outside of the schema's folder"):
        read(path)


def test_links_do_not_lead_out(library):
    (library / "link.txt").symlink_to(library.parent / "secret.txt")
    with pytest.raises(PmlError, match="outside of the schema's folder"):
        read(schema_with(library, "link.txt"))
    (library / "loop").symlink_to(library / "loop")
    with pytest.raises(PmlError, match=r"schema.xml:2:3: "):
        read(schema_with(library, "loop"))


def test_sources_that_cannot_be_read(library, monkeypatch):
    for src, message in (("none.txt", "none.txt is no file"), ("src", "src is no file")):
        with pytest.raises(PmlError, match=f"schema.xml:2:3: .*{message}"):
            read(schema_with(library, src))
    (library / "bytes").write_bytes(b"ab\ncd \xff")
    with pytest.raises(PmlError, match=r"bytes:2:4: byte 0xff is not utf-8 text"):
        read(schema_with(library, "bytes"))
    with pytest.raises(PmlError, match=r"schema.xml:2:3: module m has src and content"):
        read(schema_with(library, "src/unit.py", "more"))
    monkeypatch.setattr("onestem.pml.files.MAX_BYTES", 400)
    (library / "long").write_bytes(b"x" * 401)
    with pytest.raises(PmlError, match=r"schema.xml:2:3: .*long has more than 400 bytes"):
        read(schema_with(library, "long"))


def test_files(library):
    with pytest.raises(PmlError, match=r"none.xml is no file$"):
        read(library / "none.xml")
    path = library / "prompt.xml"
    path.write_text('<prompt schema="s"><m></prompt>')
    with pytest.raises(PmlError) as caught:
        read_prompt(path)
    assert str(caught.value).startswith(f"{path}:1:23: </prompt> closes <m> of line 1")
