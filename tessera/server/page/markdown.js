// Markdown as DOM nodes: paragraphs, headings, lists, tables, code, bold and italic. Text only becomes text nodes.
import { element } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)/;
const HEADING = /^(#{1,6})\s+/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const BREAKS = [FENCE, HEADING, ITEM, RULE]; // a line that ends a paragraph
const TABLE_LINE = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
const INLINE = /`([^`\n]+)`|\*\*(?!\s)((?:[^*]|\*(?!\*))+\*?)\*\*|\*(?![\s*])([^*]+)(?<!\s)\*/g;
const MAX_DEPTH = 6; // of lists in lists: the text may be hostile

export class Markdown {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }

  // Show a text. Blocks that are as before keep their nodes, so a selection survives while an answer grows.
  show(text) {
    const blocks = split(text.split("\n"));
    const sources = blocks.map(lines => lines.join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map(lines => block(lines, 0)));
    this.sources = sources;
  }
}

// Return the blocks of a text, each as its lines.
function split(lines) {
  const blocks = [];
  const isTable = at => lines[at].includes("|") && TABLE_LINE.test(lines[at + 1] ?? "");
  for (let at = 0; at < lines.length;) {
    const begin = at++;
    if (!lines[begin].trim()) continue;
    const fence = FENCE.exec(lines[begin])?.[1];
    if (fence) {
      while (at < lines.length && !lines[at].trimStart().startsWith(fence)) at++;
      at++;
    } else if (ITEM.test(lines[begin]) && !RULE.test(lines[begin])) {
      const isPart = line => ITEM.test(line ?? "") || /^\s+\S/.test(line ?? "");
      while (isPart(lines[at]) || (lines[at]?.trim() === "" && isPart(lines[at + 1]))) at++;
    } else if (isTable(begin)) {
      while (lines[at]?.includes("|")) at++;
    } else if (!BREAKS.some(kind => kind.test(lines[begin]))) {
      while (lines[at]?.trim() && !BREAKS.some(kind => kind.test(lines[at])) && !isTable(at)) at++;
    }
    blocks.push(lines.slice(begin, at));
  }
  return blocks;
}

function block(lines, depth) {
  const [first] = lines;
  const fence = FENCE.exec(first)?.[1];
  if (fence) {
    const isClosed = lines.length > 1 && lines.at(-1).trimStart().startsWith(fence);
    return element("pre", {}, element("code", {}, lines.slice(1, isClosed ? -1 : undefined).join("\n")));
  }
  if (RULE.test(first)) return element("hr");
  const heading = HEADING.exec(first);
  if (heading) return element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(first.slice(heading[0].length)));
  if (ITEM.test(first) && depth < MAX_DEPTH) return list(lines, depth);
  if (TABLE_LINE.test(lines[1] ?? "")) return table(lines);
  return element("p", {}, ...inline(lines.join("\n")));
}

function list(lines, depth) {
  const [, indent, number] = ITEM.exec(lines[0]);
  const items = [];
  let width = 0; // of the marker
  for (const line of lines) {
    const match = ITEM.exec(line);
    const begins = match && match[1].length <= indent.length + 1;
    if (begins) items.push([]);
    width = begins ? match[0].length : width;
    items.at(-1).push(line.slice(begins ? width : Math.min(width, line.search(/\S|$/))));
  }
  const nodes = items.map(item => element("li", {}, ...split(item).map(part => block(part, depth + 1))));
  return number === undefined ? element("ul", {}, ...nodes) : element("ol", { start: Number(number) }, ...nodes);
}

function table(lines) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => inline(cell.trim()));
  const row = (line, kind) => element("tr", {}, ...cells(line).map(nodes => element(kind, {}, ...nodes)));
  const rows = lines.slice(2).map(line => row(line, "td"));
  return element("div", { className: "wide" }, element("table", {}, row(lines[0], "th"), ...rows));
}

function inline(text, depth = 0) {
  const nodes = [];
  let end = 0;
  for (const match of depth > 2 ? [] : text.matchAll(INLINE)) {
    const [all, code, bold, italic] = match;
    const inner = code === undefined ? inline(bold ?? italic, depth + 1) : [code];
    nodes.push(text.slice(end, match.index), element(code ? "code" : bold ? "strong" : "em", {}, ...inner));
    end = match.index + all.length;
  }
  return [...nodes, text.slice(end)];
}
