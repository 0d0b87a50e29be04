# The C view of core/pack under one name.

from ggml_sched.core.pack.api cimport method_name, pack_any_times, pack_method_word
from ggml_sched.core.pack.solve cimport gs_blocks, gs_pack, gs_packing, pack_prepared
