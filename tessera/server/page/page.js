// The chat page: one conversation with one or two models.
import { addressOf, HOME, nameOf, request, saveKey } from "./api.js";
import { Answer } from "./answer.js";
import { byId, element, say, switchLanguage, translate } from "./dom.js";
import { readImage } from "./images.js";

const [main, question, selects] = [byId("turns"), byId("question"), [byId("model"), byId("second-model")]];
const settings = [...byId("settings").querySelectorAll("[name]")];
const running = new Set(); // an AbortController for each answer that is requested
let turns = []; // of the conversation: {text, images, answers}
let images = []; // of the next question: {url, node}

const notify = text => void (byId("notice").textContent = text);
const showRunning = () => document.body.classList.toggle("running", running.size > 0);

// Return the addresses whose models are listed: of this server, and of a second one.
function servers() {
  const text = byId("second-server").value.trim();
  if (text && !addressOf(text)) notify(say("notAddress", { text }));
  return [...new Set([HOME, addressOf(text || HOME) ?? HOME])];
}

async function loadModels() {
  notify("");
  const options = [];
  for (const server of servers()) {
    try {
      const { data } = await (await request(server, "v1/models")).json();
      const suffix = server === HOME ? "" : ` · ${nameOf(server)}`;
      options.push(...data.map(({ id }) => ({ value: JSON.stringify({ server, model: id }), text: id + suffix })));
    } catch (error) {
      notify(error.message);
      failed(server, error);
    }
  }
  selects.forEach((select, column) => {
    const before = options.find(({ value }) => value === select.value && !select.hidden);
    select.replaceChildren(...options.map(option => element("option", option)));
    select.value = (before ?? options[column] ?? options[0])?.value;
  });
}

// Ask for the key of a server that refused a request because of it.
function failed(server, { status }) {
  const dialog = byId("key");
  if (status !== 401 || dialog.open) return;
  const input = dialog.querySelector("input");
  byId("key-title").replaceChildren(element("span", { word: "keyNeeded", values: { server: nameOf(server) } }));
  input.value = dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue !== "use") return;
    saveKey(server, input.value);
    loadModels();
  };
  dialog.showModal();
}

function chosenModels() {
  const columns = selects.filter(select => !select.hidden);
  return columns.map(({ value }) => (value ? JSON.parse(value) : { server: HOME, model: null }));
}

function userMessage({ text, images }) {
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text };
}

// Return the messages up to the question of a turn. Turns without an answer are left out.
function messagesOf(turn, column, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const earlier of turns.slice(0, turns.indexOf(turn))) {
    const { text } = earlier.answers[column] ?? earlier.answers[0];
    if (text) messages.push(userMessage(earlier), { role: "assistant", content: text });
  }
  return [...messages, userMessage(turn)];
}

async function ask(turn, column, chosen) {
  const filled = settings.filter(({ value }) => value.trim());
  const fields = filled.map(({ name, type, value }) => [name, type === "number" ? Number(value) : value]);
  const { system, second_server, ...sampling } = Object.fromEntries(fields);
  const controller = new AbortController();
  running.add(controller);
  showRunning();
  question.focus();
  await turn.answers[column].run({
    ...chosen,
    messages: () => messagesOf(turn, column, system),
    images: turns.flatMap(({ images }) => images),
    sampling,
    signal: controller.signal,
  });
  running.delete(controller);
  showRunning();
}

function send() {
  const text = question.value.trim();
  if (running.size || (!text && !images.length)) return;
  const turn = { text, images };
  const chosen = chosenModels();
  const again = column => ask(turn, column, chosenModels()[column] ?? turn.answers[column]);
  turn.answers = chosen.map((_, column) => new Answer(() => again(column), failed));
  const pictures = element("ul", {}, ...images.map(({ node }) => element("li", {}, node)));
  const asked = element("div", { className: "question" }, pictures, element("p", {}, text));
  const answers = element("div", { className: "answers" }, ...turn.answers.map(({ node }) => node));
  main.append(element("article", {}, asked, answers));
  main.scrollTop = main.scrollHeight;
  turns.push(turn);
  question.value = "";
  showImages([]);
  notify("");
  chosen.forEach((model, column) => ask(turn, column, model));
}

function stop() {
  running.forEach(controller => controller.abort());
  question.focus();
}

function clear() {
  stop();
  turns = [];
  main.querySelectorAll("article").forEach(article => article.remove());
}

// Show the images of the next question, each with a button that removes it.
function showImages(next) {
  images = next;
  const items = images.map(image => {
    const remove = { label: "remove", values: { name: image.node.alt } };
    const onclick = () => showImages(images.filter(other => other !== image));
    return element("li", {}, image.node, element("button", { type: "button", ...remove, onclick }, "×"));
  });
  byId("images").replaceChildren(...items);
}

async function addImages(files) {
  notify("");
  for (const file of files) {
    const image = await readImage(file).catch(() => notify(say("unreadable", { name: file.name })));
    if (image) showImages([...images, image]);
  }
}

for (const kind of ["dragover", "drop", "paste"]) {
  document.addEventListener(kind, event => {
    const data = event.dataTransfer ?? event.clipboardData;
    const isText = kind === "paste" && data.types.includes("text/plain"); // copied cells have an image, too
    if (isText || !data.types.includes("Files")) return;
    event.preventDefault();
    if (kind !== "dragover") addImages([...data.files]);
  });
}
document.addEventListener("keydown", event => {
  const isForDialog = document.querySelector(":popover-open, dialog[open]");
  if (event.key === "Escape" && !event.isComposing && !isForDialog) stop();
});
question.onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter chooses a character
  event.preventDefault();
  send();
};
byId("compare").onclick = ({ target }) => {
  selects[1].hidden = !selects[1].hidden;
  target.ariaPressed = !selects[1].hidden;
};
const actions = { send, clear, stop, language: switchLanguage, attach: () => byId("files").click() };
for (const [id, action] of Object.entries(actions)) byId(id).onclick = action;
byId("files").onchange = ({ target }) => {
  addImages([...target.files]);
  target.value = "";
};
for (const field of settings) {
  field.value = localStorage.getItem(`setting ${field.name}`) ?? "";
  field.addEventListener("change", () => localStorage.setItem(`setting ${field.name}`, field.value));
}
byId("second-server").addEventListener("change", loadModels);
byId("origin").textContent = `--allow-origin ${location.origin}`;
translate();
loadModels();
question.focus();
