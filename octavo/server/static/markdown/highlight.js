// Source code to coloured pieces: [kind, text], kind "" for plain text. A scanner that knows comments, strings, numbers, names and
// keywords is enough to read by; it is not a parser. Each pattern reads forward only.

const MAX_LENGTH = 60_000; // characters; longer code stays plain

const words = (text) => new Set(text.split(" "));
const END = "(?![^])"; // the end of the text
const DOUBLE = `"(?:[^"\\\\\\n]|\\\\.)*"?`;
const SINGLE = `'(?:[^'\\\\\\n]|\\\\.)*'?`;
const TICK = "`(?:[^`\\\\]|\\\\[^])*`?";
const SLASHES = "//[^\\n]*";
const BLOCK = `/\\*[^]*?(?:\\*/|${END})`;
const HASH = "#[^\\n]*";
const DASHES = "--[^\\n]*";
const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.[\\d_]+)?(?:[eE][+-]?\\d+)?)[a-zA-Z]{0,3}\\b";
const NAME = "[A-Za-z_$@][\\w$]*";

const C_WORDS = "if else for while do switch case default break continue return goto const static struct enum union typedef sizeof void int char long short float double unsigned signed bool true false null nullptr auto extern inline volatile register";
const LANGUAGES = {
  python: { comment: HASH, string: `[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|${END})|'''[^]*?(?:'''|${END})|${DOUBLE}|${SINGLE})`, words: words("False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda match case nonlocal not or pass raise return try while with yield self") },
  javascript: { comment: `${SLASHES}|${BLOCK}`, string: `${DOUBLE}|${SINGLE}|${TICK}`, words: words("async await break case catch class const continue debugger default delete do else export extends false finally for from function get if import in instanceof interface let new null of private public readonly return set static super switch this throw true try type typeof undefined var void while with yield enum implements namespace declare") },
  json: { comment: `${SLASHES}|${BLOCK}`, string: DOUBLE, words: words("true false null") },
  bash: { comment: "(?<=^|\\s)#[^\\n]*", string: `${DOUBLE}|'[^']*'?|\\$\\{?[\\w@#?*!]+\\}?`, words: words("if then else elif fi for while until do done case esac in function return exit local export readonly set unset shift source echo cd sudo") },
  c: { comment: `${SLASHES}|${BLOCK}`, string: `${DOUBLE}|${SINGLE}|^[ \\t]{0,60}#[^\\n]*`, words: words(`${C_WORDS} class public private protected virtual override final namespace using template typename new delete this try catch throw constexpr noexcept operator friend explicit size_t uint8_t uint32_t uint64_t int32_t int64_t std string vector`) },
  java: { comment: `${SLASHES}|${BLOCK}`, string: `"""[^]*?(?:"""|${END})|${DOUBLE}|${SINGLE}`, words: words(`${C_WORDS} class interface extends implements public private protected final abstract new this super import package throws throw try catch finally instanceof boolean byte String var val fun when object override suspend data is in as by companion foreach namespace using string decimal async await get set readonly record`) },
  go: { comment: `${SLASHES}|${BLOCK}`, string: `${DOUBLE}|${SINGLE}|\`[^\`]*\`?`, words: words("break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var nil true false string int int64 float64 bool byte rune error any make len append") },
  rust: { comment: `${SLASHES}|${BLOCK}`, string: `${DOUBLE}|'(?:[^'\\\\\\n]|\\\\.)'`, words: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while i32 i64 u8 u32 u64 usize f32 f64 bool str String Vec Option Some None Result Ok Err Box") },
  sql: { comment: `${DASHES}|${BLOCK}`, string: `${SINGLE}|${DOUBLE}`, isCaseless: true, words: words("select from where and or not insert into values update set delete create table drop alter add primary key foreign references join left right inner outer full on group by order having limit offset as distinct union all case when then else end is null in exists between like index view with returning default constraint unique int integer text varchar boolean date timestamp asc desc count sum avg min max") },
  css: { comment: BLOCK, string: `${DOUBLE}|${SINGLE}|#[\\da-fA-F]{3,8}\\b`, name: "[@.#]?-{0,2}[A-Za-z_][\\w-]*", words: words("important auto none inherit initial flex grid block inline absolute relative fixed sticky @media @import @keyframes @font-face @supports") },
  yaml: { comment: "(?<=^|\\s)#[^\\n]*", string: `${DOUBLE}|${SINGLE}|^[ \\t]{0,60}(?:- ){0,4}[\\w./-]{1,80}(?=:(?:\\s|$))`, words: words("true false null yes no on off") },
  toml: { comment: HASH, string: `${DOUBLE}|${SINGLE}|^\\[[^\\n]*\\]`, words: words("true false") },
  html: { comment: `<!--[^]*?(?:-->|${END})`, string: `${DOUBLE}|${SINGLE}`, name: "</?[A-Za-z][\\w:-]*|/?>|[A-Za-z_:][\\w:.-]*(?==)", words: words("") },
  diff: { comment: "^@@[^\\n]*|^(?:diff|index|---|\\+\\+\\+) [^\\n]*", string: "^\\+[^\\n]*", number: "^-[^\\n]*", words: words("") },
};
const ALIASES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript", node: "javascript", sh: "bash", shell: "bash", zsh: "bash", console: "bash", "shell-session": "bash", dockerfile: "bash", makefile: "bash",
  "c++": "c", cpp: "c", h: "c", hpp: "c", cuda: "c", objc: "c", kotlin: "java", kt: "java", "c#": "java", csharp: "java", cs: "java", scala: "java", swift: "java", php: "java", golang: "go", rs: "rust", scss: "css", less: "css", yml: "yaml", ini: "toml", xml: "html", svg: "html", vue: "html", patch: "diff", jsonc: "json", json5: "json", postgresql: "sql", mysql: "sql", sqlite: "sql", ruby: "python", rb: "python",
};
const scanners = new Map();

export function highlight(text, language) {
  const name = language.toLowerCase(), known = LANGUAGES[name] ? name : ALIASES[name];
  if (!known || text.length > MAX_LENGTH) return [["", text]];
  const { isCaseless, words } = LANGUAGES[known];
  const pieces = [];
  let at = 0;
  const add = (kind, piece) => {
    if (!piece) return;
    if (pieces.length && pieces.at(-1)[0] === kind) pieces.at(-1)[1] += piece;
    else pieces.push([kind, piece]);
  };
  for (const found of text.matchAll(scanner(known))) {
    add("", text.slice(at, found.index));
    at = found.index + found[0].length;
    const { comment, string, number, name } = found.groups;
    const isWord = name !== undefined && words.has(isCaseless ? name.toLowerCase() : name);
    add(comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number" : isWord || known === "html" ? "keyword" : name !== undefined && text[at] === "(" ? "function" : "", found[0]);
  }
  add("", text.slice(at));
  return pieces;
}

function scanner(name) {
  if (!scanners.has(name)) {
    const { comment, string, number = NUMBER, name: word = NAME } = LANGUAGES[name];
    scanners.set(name, new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<number>${number})|(?<name>${word})`, "gm"));
  }
  return scanners.get(name);
}
