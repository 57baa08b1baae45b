"""Send requests with OpenAI's client, each with its own latency objectives.

python -m jaxserve.run &
python examples/client.py http://127.0.0.1:8000
"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        talk(client)


def talk(client: OpenAI) -> None:
    model = client.models.list().data[0].id

    # An interactive request: first token within 500 ms, then 30 ms per token.
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What does os.path.join do?"}],
        max_completion_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ttft_slo_ms": 500, "tpot_slo_ms": 30},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        else:
            print(f"\n{chunk.usage.total_tokens} tokens")

    # A background request: it runs when no other request needs the devices.
    made = client.completions.create(
        model=model, prompt="def main(", max_tokens=32, extra_body={"service_tier": "flex"}
    )
    print(made.choices[0].text)

    # A gateway can set objectives with headers.
    made = client.completions.create(
        model=model, prompt="import os", max_tokens=8, extra_headers={"x-llm-d-slo-ttft-ms": "2000"}
    )
    print(made.choices[0].text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
