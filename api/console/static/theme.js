// Sets the chosen theme before anything is drawn. A classic script on purpose: modules run too late for that.
(() => {
  const chosen = localStorage.getItem("lorasrv.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
