"""The published LoRA kernels of other engines, measured by the clock that measures ours.

`python -m benchmarks.peers.fetch` downloads the engines' wheels and unpacks the few files that hold
Triton kernels and their launchers into `.fetched/`, which git ignores: none of that code is part of
this repository. The modules here import those files, with small stand-ins for what they import in
turn, and drive them as the engines do.

    fetch         download and unpack
    imports       import some files of a package, and stand-ins for the rest
    operands      the operands of our workloads in the layouts that the engines want
    agreement     whether two results are the same up to bf16 rounding
    contest       who is measured on a dense site, and the gate before a time
    record_types  stand-ins for two libraries that describe records
    vllm          vLLM's dense kernels        vllm_experts    its fused kernels for experts
    sglang        SGLang's dense back ends    sglang_v2       its back end `triton_v2`
"""
