// Asks before something is deleted.

import { byId, setText } from "./dom.js";

/** Resolves to { force } if whoever is asked agrees, and to null if not. */
export function confirmDelete(title, text) {
  const dialog = byId("confirm-dialog");
  const force = byId("confirm-force");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  force.checked = false;
  let agreed = null;
  const yes = () => {
    agreed = { force: force.checked };
    dialog.close();
  };
  const no = () => dialog.close();
  byId("confirm-yes").addEventListener("click", yes);
  byId("confirm-no").addEventListener("click", no);
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        byId("confirm-yes").removeEventListener("click", yes);
        byId("confirm-no").removeEventListener("click", no);
        resolve(agreed);
      },
      { once: true },
    );
  });
}
