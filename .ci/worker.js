// The search runs in a worker, which browsers do not start for a page that was opened as a file. There a hidden frame
// stands in for it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.addEventListener("message", (event) => this.onmessage?.(event));
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.send(this, data);
      const script = inside.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.send(this.frame.contentWindow, data));
    }
    send(target, message) {
      const data = structuredClone(message); // as a message to a worker, it is another object, and comes later
      setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
