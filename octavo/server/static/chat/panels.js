// The conversations at the left and the panel at the right. On a narrow screen both are drawers over the chat.

import { find } from "../shared/common.js";

const NARROW = matchMedia("(max-width: 900px)");
const SIDEBAR = "octavo-sidebar";

export const isNarrow = () => NARROW.matches;

export function showSidebar(isShown) {
  document.body.classList.toggle("no-sidebar", !isShown);
  find("sidebar").inert = !isShown;
  find("sidebar-open").classList.toggle("hidden", isShown && !isNarrow());
  if (!isNarrow()) localStorage.setItem(SIDEBAR, isShown ? "" : "hidden");
  else if (isShown) closePanel();
  shade();
}

export const isSidebarShown = () => !document.body.classList.contains("no-sidebar");

let opener = null; // gets the focus back
export function openPanel(tab) {
  opener = document.activeElement;
  const isSettings = tab === "settings";
  if (isNarrow()) showSidebar(false);
  find("panel").classList.remove("hidden");
  find("controls").classList.toggle("hidden", !isSettings);
  find("instruments").classList.toggle("hidden", isSettings);
  find("tab-settings").setAttribute("aria-selected", String(isSettings));
  find("tab-inspect").setAttribute("aria-selected", String(!isSettings));
  find("settings-open").setAttribute("aria-expanded", String(isSettings));
  find("inspect-open").setAttribute("aria-expanded", String(!isSettings));
  shade();
}

export function closePanel() {
  if (find("panel").classList.contains("hidden")) return false;
  find("panel").classList.add("hidden");
  for (const name of ["settings-open", "inspect-open"]) find(name).setAttribute("aria-expanded", "false");
  shade();
  if (find("panel").contains(document.activeElement)) opener?.focus?.();
  return true;
}

function shade() {
  const isCovered = isNarrow() && (isSidebarShown() || !find("panel").classList.contains("hidden"));
  find("shade").classList.toggle("hidden", !isCovered);
}

// `onInspect` is called before the instruments are shown.
export function wirePanels(onInspect) {
  const toggle = (tab) => () => {
    const isOpen = !find("panel").classList.contains("hidden") && find(`tab-${tab}`).getAttribute("aria-selected") === "true";
    if (isOpen) return closePanel();
    if (tab === "inspect") onInspect();
    openPanel(tab);
  };
  find("settings-open").addEventListener("click", toggle("settings"));
  find("inspect-open").addEventListener("click", toggle("inspect"));
  find("tab-settings").addEventListener("click", () => openPanel("settings"));
  find("tab-inspect").addEventListener("click", () => {
    onInspect();
    openPanel("inspect");
  });
  find("panel-close").addEventListener("click", closePanel);
  find("sidebar-open").addEventListener("click", () => showSidebar(true));
  find("sidebar-close").addEventListener("click", () => showSidebar(false));
  find("shade").addEventListener("click", () => {
    closePanel();
    showSidebar(false);
  });
  NARROW.addEventListener("change", () => showSidebar(!isNarrow() && localStorage.getItem(SIDEBAR) !== "hidden"));
  showSidebar(!isNarrow() && localStorage.getItem(SIDEBAR) !== "hidden");
}
