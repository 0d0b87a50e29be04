# find_package(ggml-sched CONFIG) gives the target ggml-sched::headers; nothing is linked.
if(NOT TARGET ggml-sched::headers)
  get_filename_component(_ggml_sched_include "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  add_library(ggml-sched::headers INTERFACE IMPORTED)
  set_target_properties(ggml-sched::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_ggml_sched_include}")
  unset(_ggml_sched_include)
endif()
