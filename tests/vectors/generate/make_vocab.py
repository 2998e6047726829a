"""Writes a vocabulary-only GGUF: all keys of a model's file, none of its tensors.

    python make_vocab.py MODEL.gguf OUT.gguf

needs: gguf, numpy. vocab/smollm2.gguf was made from SmolLM2-135M-Instruct.Q4_1.gguf.
"""
import sys

import gguf


def main(source, target):
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, field.contents(), kind, sub_type=field.types[1])
        else:
            writer.add_key_value(name, field.contents(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
