// The dialog for the key. What is typed goes to sessionStorage, and nowhere else.

import { hasKey, session, setKey } from "./api.js";
import { byId, setText } from "./dom.js";

export function startKey() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  let offered = false;
  const open = (why) => {
    setText(byId("key-note"), why);
    byId("key-forget").hidden = !hasKey();
    input.value = "";
    if (!dialog.open && !document.querySelector("dialog[open]")) dialog.showModal();
    input.focus();
  };
  const tell = () => setText(byId("key-button"), hasKey() ? "Key set" : "Key");
  byId("key-button").addEventListener("click", () => open(hasKey() ? "A key is set. A new one takes its place." : ""));
  byId("key-close").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => {
    setKey(null);
    dialog.close();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (/[^\x21-\x7e]/.test(key)) {
      setText(byId("key-note"), "A key has letters, digits and signs of ASCII only, and no blanks. Enter it again.");
      return;
    }
    input.value = "";
    dialog.close();
    offered = false;
    setKey(key);
  });
  session.addEventListener("key", tell);
  // Once a key: whoever closes the dialog wants to look at what needs none.
  session.addEventListener("refused", () => {
    if (offered) return;
    offered = true;
    open(hasKey() ? "The server does not know this key. Enter another." : "This server wants a key.");
  });
  tell();
}
