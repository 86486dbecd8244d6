# What an installation holds: headers, the library, and what find_package and pkg-config read.
include(CMakePackageConfigHelpers)

set(flashmla_needs_openmp OFF)
if(NOT BUILD_SHARED_LIBS AND FLASHMLA_OPENMP AND OpenMP_CXX_FOUND)
  # A static library leaves its dependencies to whoever links it.
  set(flashmla_needs_openmp ON)
  target_link_libraries(flashmla INTERFACE $<INSTALL_INTERFACE:OpenMP::OpenMP_CXX>)
  set(flashmla_private_libs "-lstdc++ ${OpenMP_CXX_FLAGS}")
elseif(NOT BUILD_SHARED_LIBS)
  set(flashmla_private_libs "-lstdc++")
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
