// Keyboard shortcuts. A key without Ctrl counts only where no text is being written.

import { find } from "../shared/common.js";
import { closePanel, isSidebarShown, showSidebar } from "./panels.js";

// `actions`: fresh(), inspect(), stop() → whether there was something to stop
export function installShortcuts(actions) {
  const keys = find("keys");
  const showKeys = () => keys.showModal();
  find("keys-open").addEventListener("click", showKeys);
  find("keys-close").addEventListener("click", () => keys.close());
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const isWriting = event.target.closest?.("input, textarea, select");
    const hasControl = event.ctrlKey || event.metaKey, letter = event.key.toLowerCase();
    const run = (action) => {
      event.preventDefault();
      action();
    };
    if (hasControl && event.shiftKey && letter === "o") run(actions.fresh);
    else if (hasControl && !event.shiftKey && letter === "k") run(() => {
      showSidebar(true);
      find("search").focus();
      find("search").select();
    });
    else if (hasControl && !event.shiftKey && letter === "b") run(() => showSidebar(!isSidebarShown()));
    else if (hasControl && event.key === ".") run(() => find("settings-open").click());
    else if (hasControl && !event.shiftKey && letter === "i") run(actions.inspect);
    else if (event.key === "Escape") {
      if (actions.stop() || closePanel()) event.preventDefault();
    } else if (isWriting || hasControl || event.altKey) return;
    else if (event.key === "/") run(() => find("prompt").focus());
    else if (event.key === "?") run(showKeys);
  });
}
