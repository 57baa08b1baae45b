"""Generate for a few prompts without a server: `python examples/offline.py`."""

from jaxserve import LLM, SLO, SamplingParams

PROMPTS = ["def main(", "import os\n", "class Stack:\n"]


def main(llm: LLM) -> None:
    # One set of parameters for all prompts, or a list with one per prompt.
    params = SamplingParams(temperature=0.0, max_tokens=32)
    for output in llm.generate(PROMPTS, params, slo=SLO(ttft=2.0, tpot=0.1)):
        times = output.metrics
        print(f"--- first token after {times.ttft:.3f} s, then {times.tpot:.4f} s per token")
        print(output.prompt + output.outputs[0].text)

    # Several outputs for one prompt, with the log-probabilities of the top alternatives of each token.
    (output,) = llm.generate(PROMPTS[0], SamplingParams(n=2, seed=1, max_tokens=8, logprobs=2), use_tqdm=False)
    for one in output.outputs:
        print(one.index, repr(one.text), one.cumulative_logprob)

    (output,) = llm.chat([{"role": "user", "content": "What does os.path.join do?"}], params, use_tqdm=False)
    print(output.outputs[0].text)


if __name__ == "__main__":
    # Without a model name, the demo model is used. With accelerators, try model="Qwen/Qwen3-8B", mesh="4x2".
    with LLM(mesh="2x1", max_model_len=512, max_num_seqs=16) as llm:
        main(llm)
