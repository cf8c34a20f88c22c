// Signs for buttons, drawn as lines of one width in a box of 24.

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M20 20l-4-4",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.4 3.4 0 0 1 5 5l-8.6 8.4a1.7 1.7 0 0 1-2.4-2.4L15 7.5",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  done: "M5 13l4.5 4.5L19 7",
  cross: "M6 6l12 12M18 6L6 18",
  edit: "M4 20l1-4L16.5 4.5l3 3L8 19zM14 7l3 3",
  again: "M20 5v5h-5M4 19v-5h5M19 10a7.5 7.5 0 0 0-13-3M5 14a7.5 7.5 0 0 0 13 3",
  forward: "M5 6l7 6-7 6zM13 6l7 6-7 6z",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  odds: "M5 20V11M10 20V5M15 20v-6M20 20v-3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  more: "M5.5 12h.01M12 12h.01M18.5 12h.01",
  out: "M12 15V4M8 8l4-4 4 4M5 14v6h14v-6",
  into: "M12 4v11M8 11l4 4 4-4M5 14v6h14v-6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1 1M17.4 17.4l1 1M5.6 18.4l1-1M17.4 6.6l1-1",
  moon: "M20 14.5A8.2 8.2 0 0 1 9.5 4 8.2 8.2 0 1 0 20 14.5",
  keys: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  pause: "M9 6v12M15 6v12",
  play: "M8 5l11 7-11 7z",
  chat: "M4 5h16v11H10l-4 4v-4H4z",
  cockpit: "M4 19a8.5 8.5 0 1 1 16 0zM12 15l4-5",
};

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  picture.setAttribute("viewBox", "0 0 24 24");
  picture.setAttribute("aria-hidden", "true");
  path.setAttribute("d", PATHS[name]);
  picture.append(path);
  return picture;
}
