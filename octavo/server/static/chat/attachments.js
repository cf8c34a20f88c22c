// Text files as context: chosen, dropped or pasted. They are read here and sent inside the question.

import { element, find, iconButton } from "../shared/common.js";
import { icon } from "../shared/icons.js";

const MAX_FILES = 20, MAX_BYTES = 2 * 2 ** 20; // of one file
const LONG_PASTE = 4000; // characters: a longer paste becomes a file, so that the question stays readable

export class Attachments {
  // `onProblem` gets a sentence about a file that cannot be taken; `onChange` is called when the list has changed.
  constructor(onProblem, onChange) {
    Object.assign(this, { onProblem, onChange });
    this.files = []; // {name, text}
    find("attach").addEventListener("click", () => find("file-field").click());
    find("file-field").addEventListener("change", async () => {
      await this.add([...find("file-field").files]);
      find("file-field").value = "";
    });
    const area = find("chat-area");
    for (const kind of ["dragenter", "dragover"]) area.addEventListener(kind, (event) => this.over(event));
    area.addEventListener("dragleave", (event) => event.target === area && area.classList.remove("drop"));
    area.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      area.classList.remove("drop");
      this.add([...event.dataTransfer.files]);
    });
    find("prompt").addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files || [])], text = event.clipboardData?.getData("text/plain") || "";
      if (files.length) {
        event.preventDefault();
        this.add(files);
      } else if (text.length > LONG_PASTE) {
        event.preventDefault();
        this.addText(`pasted-${this.files.length + 1}.txt`, text);
      }
    });
  }

  over(event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    find("chat-area").classList.add("drop");
  }

  async add(files) {
    for (const file of files) {
      if (file.size > MAX_BYTES) this.onProblem(`The file ${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${MAX_BYTES / 2 ** 20} MiB are read.`);
      else {
        try {
          const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
          if (text.includes("\0")) throw new TypeError();
          this.addText(file.name, text);
        } catch {
          this.onProblem(`The file ${file.name} is not text: this chat reads UTF-8 text, source code, CSV, JSON and the like.`);
        }
      }
    }
  }

  addText(name, text) {
    if (this.files.length >= MAX_FILES) return this.onProblem(`A message can have ${MAX_FILES} files.`);
    this.files.push({ name: name.slice(0, 200), text: text.replaceAll("\r\n", "\n") });
    this.show();
  }

  // Give the files to a message, or take back those of one that could not be sent.
  take() {
    const taken = this.files;
    this.files = [];
    this.show();
    return taken;
  }

  put(files) {
    this.files = [...files, ...this.files];
    this.show();
  }

  show() {
    find("attached").replaceChildren(
      ...this.files.map((file, place) =>
        element("span", { class: "chip" }, icon("file"), element("span", { class: "chip-name", text: file.name }), iconButton("cross", `Remove ${file.name}`, () => {
          this.files.splice(place, 1);
          this.show();
          find("prompt").focus();
        })),
      ),
    );
    this.onChange();
  }
}
