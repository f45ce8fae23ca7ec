"""Convert LLaVA-Instruct-150K and COCO2017 below ./data to the file that `data_7b.json` names."""

from tessera.errors import reported
from tessera_compat.mindspeed_mm.llava_data import convert_llava

if __name__ == "__main__":
    with reported():
        done = convert_llava(
            "./data/llava_instruct_150k.json",
            "./data/COCO2017",
            "./data/mllm_format_llava_instruct_data.json",
            overwrite=True,
        )
        print("\n".join(done.lines()))
