// Images as data URLs. They are sent as they are, unless a request would be larger than the server accepts.
import { element } from "./dom.js";

const MAX_BODY = Number(document.querySelector("meta[name=max-body]").content);
const SMALL = 100_000; // characters of an image that is not made smaller

// Return a file as a data URL, and as an element. Raise if it is no image.
export async function readImage(file) {
  const reader = new FileReader();
  reader.readAsDataURL(file);
  await new Promise((resolve, reject) => Object.assign(reader, { onload: resolve, onerror: reject }));
  const node = element("img", { src: reader.result, alt: file.name, title: file.name });
  await node.decode();
  return { url: reader.result, node };
}

// Return the body of a request. The largest image is halved until the body fits, or nothing more can be done.
export async function fittingBody(write, images) {
  for (;;) {
    const body = write();
    const [largest] = images.toSorted((a, b) => b.url.length - a.url.length);
    if (new Blob([body]).size <= MAX_BODY || !largest || largest.url.length < SMALL) return body;
    largest.url = await halved(largest.url);
  }
}

// Return an image with half as many pixels, as JPEG.
async function halved(url) {
  const image = element("img", { src: url });
  await image.decode();
  const [width, height] = [image.naturalWidth, image.naturalHeight].map(side => Math.ceil(side * Math.SQRT1_2));
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.drawImage(image, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
