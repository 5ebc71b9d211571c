"use strict";
// Elements and text. Nothing here or elsewhere in the page parses text as HTML: every word of a run
// becomes a text node.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function svg(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

// Characters that would act, or that nobody sees: C0 and C1 controls, bidirectional marks, zero-width
// and other format characters, line and paragraph separators, tags, unpaired surrogates.
const ODD = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}/gu;

function oddName(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

// The text as nodes, with its odd characters spelled out and what was searched for marked.
function visible(text, needle = "") {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > end) nodes.push(...marked(text.slice(end, match.index), needle));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(make("span", { class: "odd", title: "U+" + code }, oddName(match[0])));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(...marked(text.slice(end), needle));
  return nodes;
}

function plainly(text) {
  return text.replace(ODD, oddName);
}

function marked(text, needle) {
  if (!needle) return [text];
  const nodes = [], low = text.toLowerCase();
  let end = 0;
  for (let at = low.indexOf(needle); at >= 0 && low.length === text.length; at = low.indexOf(needle, end)) {
    nodes.push(text.slice(end, at), make("mark", {}, text.slice(at, at + needle.length)));
    end = at + needle.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function shown(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e-12) return "0";  // what rounding leaves of a sum that is 0
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(Math.max(0, digits - 1)).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}
const percent = (value) => (Number.isFinite(value) && value !== null ? (100 * value).toFixed(1) + "%" : "–");
function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 90) return shown(seconds) + " s";
  if (seconds < 5400) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
  return Math.floor(seconds / 3600) + " h " + Math.round((seconds % 3600) / 60) + " min";
}
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + shown(Math.abs(value));

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
function hideTip() { tip.hidden = true; }
