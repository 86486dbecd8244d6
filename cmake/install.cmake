# What an installation holds: headers, the library, and what find_package and pkg-config read.
include(CMakePackageConfigHelpers)

# A static library leaves its dependencies to whoever links it.
set(flashmla_dependencies "")
set(flashmla_private_libs "")
get_target_property(flashmla_type flashmla TYPE)
if(flashmla_type STREQUAL "STATIC_LIBRARY")
  set(flashmla_private_libs "-lstdc++ -lm")
  if(FLASHMLA_OPENMP AND TARGET OpenMP::OpenMP_CXX)
    string(APPEND flashmla_dependencies "find_dependency(OpenMP COMPONENTS CXX)\n")
    string(APPEND flashmla_private_libs " ${OpenMP_CXX_FLAGS}")
    target_link_libraries(flashmla INTERFACE $<INSTALL_INTERFACE:OpenMP::OpenMP_CXX>)
  endif()
  if(with_cuda)
    string(APPEND flashmla_dependencies "find_dependency(CUDAToolkit)\n")
    string(APPEND flashmla_private_libs
           " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
    target_link_libraries(flashmla INTERFACE $<INSTALL_INTERFACE:CUDA::cudart_static>)
  endif()
endif()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashmla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS flashmla EXPORT flashmla)
install(EXPORT flashmla
        NAMESPACE flashmla::
        FILE flashmlaTargets.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/flashmlaConfig.cmake.in ${PROJECT_BINARY_DIR}/flashmlaConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashmlaConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashmlaConfig.cmake
              ${PROJECT_BINARY_DIR}/flashmlaConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)

# What was given relative to the prefix is found relative to the .pc file, so that a prefix may be
# moved. An absolute path stays, and with it the prefix that the build was configured for.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(flashmla_pc_prefix "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH upwards "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
  set(flashmla_pc_prefix "\${pcfiledir}/${upwards}")
endif()
foreach(folder LIBDIR INCLUDEDIR)
  cmake_path(APPEND flashmla_pc_${folder} "\${prefix}" "${CMAKE_INSTALL_${folder}}")
endforeach()
foreach(path prefix LIBDIR INCLUDEDIR)
  string(REPLACE " " "\\ " flashmla_pc_${path} "${flashmla_pc_${path}}")
endforeach()
configure_file(${PROJECT_SOURCE_DIR}/cmake/flashmla.pc.in ${PROJECT_BINARY_DIR}/flashmla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashmla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
