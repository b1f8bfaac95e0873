// Search runs in a Worker, which browsers refuse on pages that are opened as files. This class runs the same script in a
// hidden frame instead. It replaces Worker only for file:// addresses.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const page = this.frame.contentWindow;
    page.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    };
    page.importScripts = async (...urls) => {
      for (const one of urls) await this.load(one);
    };
    this.ready = this.load(url);
  }

  load(url) {
    const script = this.frame.contentDocument.createElement("script");
    script.src = url;
    const loaded = new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
    });
    this.frame.contentDocument.body.appendChild(script);
    return loaded;
  }

  postMessage(data) {
    const page = this.frame.contentWindow;
    this.ready.then(() => page.dispatchEvent(new page.MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

// The theme's script looks for this name to find out that it runs in a frame.
window.IFrameWorker = FrameWorker;
if (location.protocol === "file:") window.Worker = FrameWorker;
