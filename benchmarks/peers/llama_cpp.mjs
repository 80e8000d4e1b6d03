// node llama_cpp.mjs PACKAGE MODEL.gguf REQUESTS PROMPT OUTPUT THREADS: as many requests at once, each a sequence of
// random tokens in one context. Prints, as JSON, when each began and when each of its tokens came, in ms.
// Run by llama_cpp.py.

import path from "node:path";
import {pathToFileURL} from "node:url";

const [folder, file, ...numbers] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(path.resolve(folder, "dist/index.js")));
const [requests, prompt, output, threads] = numbers.map(Number);
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const contextSize = prompt + output + 8;
const context = await model.createContext({sequences: requests, contextSize, batchSize: 2048, threads});
const random = () => 100 + Math.floor(Math.random() * 48_000);

async function run(sequence) {
    const tokens = Array.from({length: prompt}, random);
    const began = performance.now();
    const stamps = [];
    for await (const _ of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        stamps.push(performance.now());
        if (stamps.length === output) break;
    }
    await sequence.clearHistory();
    return {began, stamps};
}

const sequences = Array.from({length: requests}, () => context.getSequence());
await run(sequences[0]);  // what is set up by the first one
console.log(JSON.stringify(await Promise.all(sequences.map(run))));
process.exit(0);
