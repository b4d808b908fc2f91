"""OpenVINO GenAI and llama.cpp as engines of the inference benchmark; run in the environment of each (`tools/bench/peers.py`).

inference_peers.py make FOLDER ENGINE      the peer's own form of the model in FOLDER, beside it
inference_peers.py run FOLDER ENGINE       ENGINE: openvino-fp16, openvino-int8, llamacpp-bf16, llamacpp-q8_0
"""

from __future__ import annotations

import sys
from pathlib import Path

from inference_load import HEADS, HIDDEN, INNER, KV_HEADS, THREADS, VOCAB, run


def export_openvino(folder: Path, to: Path, form: str) -> None:
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    how = OVWeightQuantizationConfig(bits=8) if form == "int8" else None
    model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=False, quantization_config=how)
    model.save_pretrained(to)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    save_model(tokenizer, to / "openvino_tokenizer.xml")
    save_model(detokenizer, to / "openvino_detokenizer.xml")


class OpenVino:
    """Continuous batching over a paged cache, as its documentation recommends for servers; the device decides the precision."""

    def __init__(self, folder: Path) -> None:
        import openvino_genai as genai

        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = False
        self._pipe = genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
        )
        self.bytes = (folder / "openvino_model.bin").stat().st_size

    def run(self, prompts: list[list[int]], count: int) -> None:
        import numpy
        from openvino import Tensor

        how = self._genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)
        how.eos_token_id, how.stop_token_ids = VOCAB - 1, {VOCAB - 1}  # one there must be; it ends nothing
        rows = [Tensor(numpy.array([p], dtype=numpy.int64)) for p in prompts]
        found = self._pipe.generate(rows, [how] * len(rows))
        if any(len(f.m_generation_ids[0]) != count for f in found):
            raise SystemExit("openvino gave another number of tokens")


def export_llamacpp(folder: Path, to: Path, form: str) -> None:
    import gguf
    import numpy
    from safetensors import safe_open

    kind = gguf.GGMLQuantizationType.BF16 if form == "bf16" else gguf.GGMLQuantizationType.Q8_0
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
    layers = 1 + max(int(n.split(".")[2]) for n in tensors if ".layers." in n)
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{i}" for i in range(VOCAB)])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([1] * VOCAB)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in tensors.items():
        wanted = names.get_name(name, try_suffixes=(".weight",))
        if "q_proj" in name or "k_proj" in name:  # the pairs that turn are neighbours there
            heads = HEADS if "q_proj" in name else KV_HEADS
            tensor = tensor.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(-1, HIDDEN)
        data = numpy.ascontiguousarray(tensor)
        if data.ndim == 1:
            writer.add_tensor(wanted, data)
        else:
            writer.add_tensor(wanted, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """Its own greedy loop; the 32 requests one after the other, since its Python face has no batches of them."""

    def __init__(self, file: Path) -> None:
        from llama_cpp import Llama

        self._model = Llama(
            str(file), n_ctx=2048, n_threads=THREADS, n_threads_batch=THREADS, n_batch=512, verbose=False
        )
        self.bytes = file.stat().st_size

    def run(self, prompts: list[list[int]], count: int) -> None:
        for prompt in prompts:
            self._model.reset()
            for number, _ in enumerate(self._model.generate(prompt, temp=0.0, reset=True), 1):
                if number == count:
                    break


def main() -> None:
    what, folder, engine = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    kind, form = engine.split("-", 1)
    to = folder.parent / (engine if kind == "openvino" else f"{engine}.gguf")
    if what == "make":
        if not to.exists():
            (export_openvino if kind == "openvino" else export_llamacpp)(folder, to, form)
        return
    run(lambda: OpenVino(to) if kind == "openvino" else LlamaCpp(to))


if __name__ == "__main__":
    main()
