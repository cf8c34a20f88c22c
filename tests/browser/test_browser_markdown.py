"""The formatted answers: what Markdown becomes, that nothing in it becomes more than text, and that no text takes long."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import PATIENCE_S, until
from tests.browser.scripted import SAY, ScriptedServer


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def page(browser: Any, server: ScriptedServer) -> Iterator[Any]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(server.base + "/play")
    page.wait_for_selector("body[data-ready=yes]")
    yield page
    page.close()


RENDER = """async (text) => {
  const { renderMarkdown } = await import("/pages/markdown/render.js");
  const box = document.createElement("div");
  box.append(...renderMarkdown(text));
  for (const bar of box.querySelectorAll("figcaption button")) bar.remove();
  return box.innerHTML;
}"""

CASES: dict[str, tuple[str, str]] = {
    "paragraphs": ("one\n\ntwo", "<p>one</p><p>two</p>"),
    "line breaks stay": ("roses are red\nviolets", "<p>roses are red<br>violets</p>"),
    "emphasis": ("**b** *i* ***both*** ~~no~~ _i_", "<p><strong>b</strong> <em>i</em> <em><strong>both</strong></em> <del>no</del> <em>i</em></p>"),
    "no emphasis inside words": ("snake_case_name and 2*3*4", "<p>snake_case_name and 2<em>3</em>4</p>"),
    "stars that are stars": ("5 * 3 * 2", "<p>5 * 3 * 2</p>"),
    "unclosed": ("**never closed", "<p>**never closed</p>"),
    "crossed": ("*a **b* c**", "<p><em>a <em><em>b</em> c</em></em></p>"),
    "code span": ("`a < b` and ``x ` y``", "<p><code>a &lt; b</code> and <code>x ` y</code></p>"),
    "headings": ("# One\n### Three ##", '<h3 data-level="1">One</h3><h5 data-level="3">Three</h5>'),
    "no heading": ("#hashtag", "<p>#hashtag</p>"),
    "rule": ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    "list": ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    "numbers": ("3. c\n4. d\n   more", '<ol start="3"><li>c</li><li>d<br>more</li></ol>'),
    "a list with room": ("- a\n\n- b", "<ul><li>a</li><li>b</li></ul>"),
    "code in a list": ("1. do\n   ```sh\n   ls\n   ```\n2. end", '<ol><li>do<figure class="code"><figcaption><span>sh</span></figcaption><pre tabindex="0" aria-label="code"><code>ls</code></pre></figure></li><li>end</li></ol>'),
    "tasks": ("- [x] done\n- [ ] open", '<ul><li class="task"><span class="box" role="img" aria-label="done">☑</span> done</li><li class="task"><span class="box" role="img" aria-label="to do">☐</span> open</li></ul>'),
    "quote": ("> a\n> b\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"),
    "table": ("| a | b |\n|---|--:|\n| 1 | `x|y` |\n| 2 |", '<div class="table" tabindex="0" role="region" aria-label="table"><table><thead><tr><th class="left" scope="col">a</th><th class="right" scope="col">b</th></tr></thead><tbody><tr><td class="left">1</td><td class="right"><code>x|y</code></td></tr><tr><td class="left">2</td><td class="right"></td></tr></tbody></table></div>'),
    "no table": ("a | b\nc | d", "<p>a | b<br>c | d</p>"),
    "maths": (r"so \(x^2\) and $a_1$" + "\n\n$$\nE = mc^2\n$$\n\n" + r"\[ y \]", '<p>so <span class="maths">x^2</span> and <span class="maths">a_1</span></p><div class="maths">E = mc^2</div><div class="maths">y</div>'),
    "prices": ("from $5 to $10, $3-$4", "<p>from $5 to $10, $3-$4</p>"),
    "entities": ("a &amp; b &lt;i&gt; &#169;", "<p>a &amp; b &lt;i&gt; ©</p>"),
    "escapes": (r"\*no\* \# \<b>", "<p>*no* # &lt;b&gt;</p>"),
    "open fence": ("```\nx = 1", '<figure class="code"><figcaption><span>text</span></figcaption><pre tabindex="0" aria-label="code"><code>x = 1</code></pre></figure>'),
    "highlighting": ('```python\ndef f(x): # no\n    return "a" + 1\n```', '<figure class="code"><figcaption><span>python</span></figcaption><pre tabindex="0" aria-label="code"><code><span class="code-keyword">def</span> <span class="code-function">f</span>(x): <span class="code-comment"># no</span>\n    <span class="code-keyword">return</span> <span class="code-string">"a"</span> + <span class="code-number">1</span></code></pre></figure>'),
    "HTML is text": ("<b>bold</b> <br> <!-- x -->", "<p>&lt;b&gt;bold&lt;/b&gt; &lt;br&gt; &lt;!-- x --&gt;</p>"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_markdown_becomes(case: str, page: Any) -> None:
    text, html = CASES[case]
    assert page.evaluate(RENDER, text) == html


def test_links_lead_to_pages_and_say_where(page: Any) -> None:
    found = page.evaluate(
        """async () => {
      const { renderMarkdown } = await import("/pages/markdown/render.js");
      const box = document.createElement("div");
      box.append(...renderMarkdown("[a](https://example.org/x_(y) \\"t\\") <https://b.example> see https://c.example/d, and mailto: [m](mailto:x@y.z) ![alt](https://d.example/i.png)"));
      return [...box.querySelectorAll("a")].map((a) => [a.textContent, a.href, a.rel, a.target, a.title === a.href]);
    }"""
    )
    rel = "noopener noreferrer nofollow"
    assert found == [
        ["a", "https://example.org/x_(y)", rel, "_blank", True],
        ["https://b.example", "https://b.example/", rel, "_blank", True],
        ["https://c.example/d", "https://c.example/d", rel, "_blank", True],
        ["m", "mailto:x@y.z", rel, "_blank", True],
        ["image: alt", "https://d.example/i.png", rel, "_blank", True],
    ]


# What a hostile model, or a hostile page that it was shown, might write. `hit` would be called by any of it that were executed.
INJECTIONS = [
    "<script>hit()</script>",
    "<img src=x onerror=hit()>",
    "<img src='/pages/icon.svg' onload=hit()>",
    "<svg onload=hit()><script>hit()</script></svg>",
    "<svg><animate onbegin=hit() attributeName=x dur=1s>",
    "<iframe src=javascript:hit()></iframe><iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "<details open ontoggle=hit()>x</details>",
    "<body onload=hit()><style>*{background:url(javascript:hit())}</style>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=hit()&gt;'>",
    "<a href=javascript:hit()>x</a><form action=javascript:hit()><button>x</button></form>",
    "[x](javascript:hit())",
    "[x](JaVaScRiPt:hit())",
    "[x](java\tscript:hit())",
    "[x](java&#10;script:hit())",
    "[x](&#106;avascript:hit())",
    "[x]( javascript:hit() )",
    "[x](<javascript:hit()>)",
    "[x](\x01javascript:hit())",
    "[x](vbscript:hit())",
    "[x](data:text/html,<script>parent.hit()</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5oaXQoKTwvc2NyaXB0Pg==)",
    "[x](blob:https://example.org/1)",
    "[x](file:///etc/passwd)",
    "[x](//evil.example/x)",
    "[x](/v1/files)",
    "<javascript:hit()>",
    "![x](javascript:hit())",
    "![x](x\"onerror=\"hit())",
    "[x](https://e.example/\"onmouseover=\"hit())",
    "[<img src=x onerror=hit()>](https://e.example)",
    "**<img src=x onerror=hit()>**",
    "`<img src=x onerror=hit()>`",
    "```html\n<script>hit()</script>\n<img src=x onerror=hit()>\n```",
    "```\"><img src=x onerror=hit()>\nx\n```",
    "```html onload=hit()\n<svg onload=hit()>\n```",
    "| <img src=x onerror=hit()> | b |\n|---|---|\n| <script>hit()</script> | [x](javascript:hit()) |",
    "- <img src=x onerror=hit()>\n  - <svg onload=hit()>",
    "> <img src=x onerror=hit()>",
    "# <img src=x onerror=hit()>",
    "$$<img src=x onerror=hit()>$$",
    "$<img src=x onerror=hit()>$",
    "&lt;img src=x onerror=hit()&gt;",
    "&#60;img src=x onerror=hit()&#62;",
    "<scr<script>ipt>hit()</scr</script>ipt>",
    "</article></main><script>hit()</script>",
    "{{constructor.constructor('hit()')()}} ${hit()} #{hit()}",
    "\u202e<script>hit()</script>\u2028<img src=x onerror=hit()>",
    "__proto__ constructor toString hasOwnProperty",
]  # fmt: skip

ALLOWED = [
    "p",
    "br",
    "strong",
    "em",
    "del",
    "code",
    "span",
    "a",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "ul",
    "ol",
    "li",
    "blockquote",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "figure",
    "figcaption",
    "pre",
    "button",
    "svg",
    "path",
]
CHECK = """async (text) => {
  window.hits = 0;
  window.hit = () => window.hits++;
  const { renderMarkdown } = await import("/pages/markdown/render.js");
  const box = document.createElement("div");
  box.append(...renderMarkdown(text));
  document.body.append(box);
  for (const link of box.querySelectorAll("a")) { link.removeAttribute("target"); link.addEventListener("click", (event) => event.preventDefault()); link.click(); }
  for (const node of box.querySelectorAll("*")) for (const kind of ["mouseover", "toggle", "load", "error", "focus"]) node.dispatchEvent(new Event(kind));
  await new Promise((resume) => setTimeout(resume, 20));
  const nodes = [...box.querySelectorAll("*")];
  const found = {
    hits: window.hits,
    tags: [...new Set(nodes.map((node) => node.localName))],
    handlers: nodes.flatMap((node) => [...node.attributes].filter((attribute) => attribute.name.startsWith("on") || attribute.name === "style" || attribute.name === "srcdoc").map((attribute) => attribute.name)),
    addresses: nodes.flatMap((node) => ["href", "src", "action", "xlink:href"].map((name) => node.getAttribute(name)).filter(Boolean)),
  };
  box.remove();
  return found;
}"""


@pytest.mark.parametrize("number", range(len(INJECTIONS)))
def test_nothing_that_a_model_writes_is_more_than_text(number: int, page: Any) -> None:
    found = page.evaluate(CHECK, INJECTIONS[number])
    assert found["hits"] == 0 and found["handlers"] == [], found
    assert set(found["tags"]) <= set(ALLOWED), found
    assert all(address.startswith(("https://", "http://", "mailto:")) for address in found["addresses"]), found


def test_hostile_answers_stay_text_in_the_chat_itself(open_page: Any, server: ScriptedServer) -> None:
    """The whole way: streamed byte by byte, stored, shown again, as a title, in a search, as odds, and with the content policy on."""
    page = open_page("/play")
    page.wait_for_selector("body[data-ready=yes]")
    page.evaluate("() => { window.hits = 0; window.hit = () => window.hits++; }")
    page.fill("#prompt", SAY + "\n\n".join(INJECTIONS))
    page.press("#prompt", "Enter")
    until(page, "document.getElementById('status').textContent.startsWith('finished')")
    assert (
        page.locator("#messages script, #messages img, #messages iframe, #messages svg[onload], #messages form").count()
        == 0
    )
    page.click(".message.assistant [aria-label^='Show the odds']")
    page.fill("#search", "onerror")
    page.wait_for_selector(".snippet")
    page.click(".talk-more")
    page.click("text=Rename")
    page.fill(".rename", "<img src=x onerror=hit()>")
    page.press(".rename", "Enter")
    until(page, "document.title.startsWith('<img')")
    assert page.evaluate("window.hits") == 0
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    page.evaluate("() => { window.hits = 0; window.hit = () => window.hits++; }")
    page.wait_for_selector(".message.assistant p")
    assert page.locator("#messages img, #messages script, #talks img").count() == 0
    assert page.evaluate("window.hits") == 0


HARD = {
    "brackets": "[" * 50_000,
    "links": "[a](" * 20_000,
    "images": "![" * 20_000 + "a" + "](x)" * 20_000,
    "stars": "*a " * 30_000 + "*" * 30_000,
    "nested stars": "*a" * 5_000 + "*" * 5_000,
    "mixed runs": "*_" * 30_000,
    "backticks": " ".join("`" * number for number in range(1, 400)),
    "ticks": "`a" * 40_000,
    "quotes": ">" * 50_000,
    "nested lists": "\n".join("  " * depth + "- x" for depth in range(400)),
    "dollars": "$a" * 40_000,
    "table": "|a" * 20_000 + "\n" + "|-" * 20_000 + "\n" + "|b" * 20_000,
    "tables": "a|b\n" * 10_000,
    "hashes": "#" * 100_000,
    "dashes": "- " * 50_000,
    "spaces": "a" + " " * 100_000 + "b",
    "entities": "&#" * 50_000,
    "maths": "$$\nx\n" * 10_000,
    "one code block": "```yaml\n" + "-" * 50_000 + "\n```",
    "strings": '```js\n"' + "\\" * 50_000 + "\n```",
    "numbers": "```c\n" + "1" * 50_000 + "x\n```",
}  # fmt: skip


@pytest.mark.parametrize("case", HARD)
def test_no_text_takes_long(case: str, page: Any) -> None:
    took = page.evaluate(
        """async (text) => {
      const { MarkdownView } = await import("/pages/markdown/render.js");
      const began = performance.now();
      new MarkdownView(document.createElement("div")).update(text);
      return performance.now() - began;
    }""",
        HARD[case],
    )
    assert took < 5000, "100 kB in a few milliseconds is usual; this is quadratic"


def test_a_growing_text_keeps_what_it_has(page: Any) -> None:
    same = page.evaluate(
        """async () => {
      const { MarkdownView } = await import("/pages/markdown/render.js");
      const box = document.createElement("div"), view = new MarkdownView(box);
      view.update("# Title\\n\\nfirst\\n\\n```js\\nlet");
      const [title, first] = box.children;
      view.update("# Title\\n\\nfirst\\n\\n```js\\nlet x\\n```\\n\\nlast");
      const kept = title === box.children[0] && first === box.children[1];
      const whole = document.createElement("div");
      new MarkdownView(whole).update("# Title\\n\\nfirst\\n\\n```js\\nlet x\\n```\\n\\nlast");
      const isSame = whole.innerHTML === box.innerHTML;
      view.update("short");
      return [kept, isSame, box.innerHTML];
    }"""
    )
    assert same == [True, True, "<p>short</p>"]
