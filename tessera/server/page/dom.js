// Elements, and their texts in two languages.
import WORDS from "./words.json" with { type: "json" };

let language = localStorage.getItem("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");

export const byId = id => document.getElementById(id);

export function say(word, values = {}) {
  return WORDS[word][language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

// Return a new element. `word`: its text in the language of the page. `label`: its name for screen readers.
export function element(tag, { word = "", label = "", values = {}, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  if (word || label) Object.assign(node.dataset, { word, label, values: JSON.stringify(values) });
  translateNode(node);
  return node;
}

function translateNode(node) {
  const { word, label, placeholder, values = "{}" } = node.dataset;
  if (word) node.textContent = say(word, JSON.parse(values));
  if (label) node.title = node.ariaLabel = say(label, JSON.parse(values));
  if (placeholder) node.placeholder = say(placeholder);
}

export function translate() {
  document.documentElement.lang = language;
  document.querySelectorAll("[data-word], [data-label], [data-placeholder]").forEach(translateNode);
}

export function switchLanguage() {
  language = language === "zh" ? "en" : "zh";
  localStorage.setItem("language", language);
  translate();
}
