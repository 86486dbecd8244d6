# What an installation holds: headers, the library, and what find_package and pkg-config read.
include(CMakePackageConfigHelpers)

# A static library leaves its dependencies to whoever links it.
set(flashmla_dependencies "")
set(flashmla_private_libs "")
if(NOT BUILD_SHARED_LIBS)
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
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashmlaConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashmlaConfig.cmake
              ${PROJECT_BINARY_DIR}/flashmlaConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flashmla)

# Paths relative to the .pc file, so that a prefix may be moved.
file(RELATIVE_PATH flashmla_pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/flashmla.pc.in ${PROJECT_BINARY_DIR}/flashmla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashmla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
