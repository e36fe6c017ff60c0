"""Writes a GGUF with every tensor expanded to f32, for comparisons that must not depend on how an engine rounds.

    pip install gguf==0.19.0
    expand_gguf.py IN.gguf OUT.gguf
"""

import sys

import gguf


def main():
    source, target = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
