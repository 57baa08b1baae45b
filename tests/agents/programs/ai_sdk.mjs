// A streamed tool loop with Vercel's AI SDK: the task is the argument.
import { readFile } from "node:fs/promises";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "jaxserve", baseURL: process.env.OPENAI_BASE_URL, apiKey: "none" });
const result = streamText({
  model: provider("jaxserve-demo"),
  prompt: process.argv[2],
  tools: {
    read_file: tool({
      description: "Show a file",
      inputSchema: z.object({ path: z.string() }),
      execute: ({ path }) => readFile(path, "utf8"),
    }),
  },
  stopWhen: stepCountIs(8),
  onError: ({ error }) => console.log(error),
});
console.log(await result.text);
